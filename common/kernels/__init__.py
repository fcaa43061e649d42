"""The small operations between matrix products and attention: one protocol, two implementations."""
