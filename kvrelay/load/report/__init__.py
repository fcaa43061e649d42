"""A report as one HTML page without scripts: charts as inline SVG."""
