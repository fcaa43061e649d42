"""The report of a run, a sweep or a comparison. Pure: results in, HTML out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from kvrelay.load.report.chart import Chart, Series
from kvrelay.load.summary import LATENCIES, STATISTICS, percentile, window_rates

_STYLE = """
:root{--ink:#1c2733;--soft:#5b6b7b;--line:#dde3ea;--page:#fff;--c0:#1667c1;--c1:#c1500f;--c2:#2c8a4b;--c3:#8a3fb0}
@media(prefers-color-scheme:dark){:root{--ink:#e4eaf1;--soft:#9aa9b8;--line:#34404d;--page:#14191f;
--c0:#63a8f5;--c1:#f59a5b;--c2:#6dc98a;--c3:#c98be8}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:2rem auto;max-width:72rem;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}.sub{color:var(--soft);margin:.2rem 0 1rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.5rem}
figure{margin:0}figcaption{font-weight:600}figure p{margin:.2rem 0}svg{width:100%;height:auto}
svg text{font-size:12px;fill:var(--soft)}@media(max-width:40rem){svg text{font-size:17px}}
.grid{stroke:var(--line)}.limit{stroke:var(--soft);stroke-dasharray:5 4}
.line{fill:none;stroke-width:2}.dots{stroke-width:4;stroke-linecap:round;opacity:.6}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}
circle.s0{fill:var(--c0)}circle.s1{fill:var(--c1)}circle.s2{fill:var(--c2)}circle.s3{fill:var(--c3)}
.key{margin-right:1rem}.key:before{content:"";display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.k0:before{background:var(--c0)}.k1:before{background:var(--c1)}.k2:before{background:var(--c2)}.k3:before{background:var(--c3)}
.scroll{overflow-x:auto}table{border-collapse:collapse}th,td{padding:.25rem .8rem .25rem 0;text-align:right}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:600}tr{border-bottom:1px solid var(--line)}
"""
_CSP = "default-src 'none'; style-src 'unsafe-inline'"
_PARTS = 60
"""Points of a chart over time."""


def render(result: Mapping[str, Any]) -> str:
    """The page for the content of a result file."""
    return {"run": _run_page, "sweep": _sweep_page, "comparison": _comparison_page}[result["kind"]](result)


def _run_page(result: Mapping[str, Any]) -> str:
    summary, config = result["summary"], result["config"]
    facts = [
        ("requests", f"{summary['succeeded']} of {summary['requests']} succeeded in {summary['wall_s']:.1f} s"),
        ("errors", ", ".join(f"{count} x {kind}" for kind, count in summary["errors"].items()) or "none"),
        ("requests/s", f"{summary['requests_per_s']:.2f}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:.1f}"),
        ("prompt tokens/s", f"{summary['prompt_tokens_per_s']:.1f}"),
    ]
    wanted = objectives(summary["slo"])
    if wanted:
        inside = f"{100 * summary['within_slo']:.1f} % of the requests inside {wanted}"
        facts.append(("goodput/s", f"{summary['goodput_per_s']:.2f} ({inside})"))
    latencies = _table(("", *STATISTICS), latency_rows(summary))
    body = [_table(("", ""), facts), "<h2>Latency, ms</h2>", latencies, "<h2>Charts</h2>"]
    return _page(f"Load on {config['model']}", result, [*body, _charts(run_charts(result))])


def run_charts(result: Mapping[str, Any]) -> list[Chart]:
    """The charts of one run; like its tables, they are about the requests that succeeded."""
    samples, slo = _succeeded(result["samples"]), result["summary"]["slo"]
    gaps = [(1000 * value, float(index)) for index, value in enumerate(result["itl_quantiles_s"])]
    over_time = [
        Chart(
            f"{title} over time",
            "seconds since the start",
            "ms",
            [Series(title, _points(samples, key), scatter=True)],
            _limit(slo, key),
        )
        for title, key in (("Time to first token", "ttft_s"), ("Time per later token", "tpot_s"))
    ]
    return [
        Chart("Time to first token", "ms", "% of requests", [Series("TTFT", _shares(samples["ttft_s"]))], y_max=100),
        Chart("Between tokens", "ms", "% of gaps", [Series("gaps", gaps)], y_max=100),
        Chart("Whole request", "ms", "% of requests", [Series("requests", _shares(samples["e2e_s"]))], y_max=100),
        *over_time,
        _throughput(result),
    ]


def _succeeded(samples: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The columns of the requests that succeeded."""
    return {
        name: [value for value, error in zip(column, samples["error"], strict=True) if not error]
        for name, column in samples.items()
    }


def _throughput(result: Mapping[str, Any]) -> Chart:
    part_s = result["summary"]["wall_s"] / _PARTS
    rates = window_rates(result, "output_tokens_per_s", _PARTS)
    points = [((index + 0.5) * part_s, rate) for index, rate in enumerate(rates)]
    return Chart("Output of requests as they end", "seconds since the start", "tokens/s", [Series("tokens/s", points)])


def _sweep_page(result: Mapping[str, Any]) -> str:
    points, slo = result["points"], result["slo"]
    columns = ("rate", "goodput/s", "inside, %", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "errors, %")
    x = "requests/s offered"
    goodput = [
        Series("goodput", [(point["rate"], point["goodput_per_s"]) for point in points]),
        Series("answered", [(point["rate"], point["requests_per_s"]) for point in points]),
    ]
    inside = [Series("inside", [(point["rate"], 100 * point["within_slo"]) for point in points])]
    wanted = [("wanted", 100 * result["attainment"])]
    charts = [
        Chart("Goodput", x, "requests/s", goodput),
        Chart("Requests inside the objectives", x, "%", inside, wanted, y_max=100),
        *(
            Chart(title, x, "ms", [_of_points(points, key, name) for name in ("p50", "p99")], _limit(slo, key))
            for title, key in (("Time to first token", "ttft_s"), ("Time per later token", "tpot_s"))
        ),
    ]
    best = result["best_rate"]
    share = f"{100 * result['attainment']:g} % of the requests inside {objectives(slo)}"
    is_found = result.get("is_limit_found", True)
    highest = "is the highest rate" if is_found else "or more is the highest rate (none that was tried is above it)"
    found = f"{best:.3g} requests/s {highest} with {share}." if best else f"No rate had {share}."
    body = [f"<p><strong>{escape(found)}</strong></p>", _charts(charts), "<h2>Rates (times in ms)</h2>"]
    return _page(f"Goodput of {result['config']['model']}", result, [*body, _table(columns, sweep_rows(result))])


def _comparison_page(result: Mapping[str, Any]) -> str:
    samples = {side: _succeeded(result[side]["samples"]) for side in ("a", "b")}
    charts = [
        Chart(
            title,
            "ms",
            "% of requests",
            [Series(side.upper(), _shares(samples[side][key])) for side in ("a", "b")],
            y_max=100,
        )
        for key, title in LATENCIES.items()
        if key != "itl_s"
    ]
    columns = ("rates per second, times in ms", "A", "B", "B / A", "95 % interval", "")
    sides = " ".join(f"{side.upper()}: {result[side]['config']['url']}." for side in ("a", "b"))
    told = f"<p>{escape(sides)} Compared by {escape(result['method'])}.</p>"
    return _page(
        "Comparison of A and B",
        result,
        [told, _table(columns, comparison_rows(result)), "<h2>Charts</h2>", _charts(charts)],
    )


def objectives(slo: Mapping[str, float | None]) -> str:
    """The goodput objectives in words; empty without any."""
    named = (("TTFT", slo["ttft_s"]), ("TPOT", slo["tpot_s"]))
    return ", ".join(f"{name} <= {value:g} s" for name, value in named if value)


Row = Sequence[str | None]
"""A row of a table; None: there is no value."""


def latency_rows(summary: Mapping[str, Any]) -> list[Row]:
    """The latencies of a run in ms."""
    return [
        (title, *(_ms(summary[key][name]) for name in STATISTICS)) for key, title in LATENCIES.items() if summary[key]
    ]


def sweep_rows(result: Mapping[str, Any]) -> list[Row]:
    """Each rate, with its goodput, the share of requests inside the objectives, times in ms and the share of errors."""
    times = [(key, name) for key in ("ttft_s", "tpot_s") for name in ("p50", "p99")]
    return [
        (
            f"{point['rate']:.3g}",
            f"{point['goodput_per_s']:.2f}",
            f"{100 * point['within_slo']:.1f}",
            *(_ms(point[key][name]) if point[key] else None for key, name in times),
            f"{100 * point['error_rate']:.1f}",
        )
        for point in result["points"]
    ]


def comparison_rows(result: Mapping[str, Any]) -> list[Row]:
    """Each figure of A and B, their ratio, its interval and the verdict."""
    rows: list[Row] = []
    for row in result["rows"]:
        scale = 1000 if row["lower_is_better"] else 1
        interval = None if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        ratio = f"{row['b'] / row['a']:.3f}" if row["a"] else None
        sides = (f"{scale * row[side]:.2f}" for side in ("a", "b"))
        rows.append((row["name"], *sides, ratio, interval, row["verdict"]))
    return rows


def _points(samples: Mapping[str, Sequence[Any]], key: str) -> list[tuple[float, float]]:
    pairs = zip(samples["sent_s"], samples[key], strict=True)
    return [(at_s, 1000 * value) for at_s, value in pairs if value is not None]


def _shares(values_s: Iterable[float | None]) -> list[tuple[float, float]]:
    """The distribution as (ms, % of the requests that took at most as long)."""
    ordered = sorted(value for value in values_s if value is not None)
    return [(1000 * percentile(ordered, share / 2), share / 2) for share in range(201)] if ordered else []


def _of_points(points: Sequence[Mapping[str, Any]], key: str, name: str) -> Series:
    return Series(name, [(point["rate"], 1000 * point[key][name]) for point in points if point[key]])


def _limit(slo: Mapping[str, float | None], key: str) -> list[tuple[str, float]]:
    value = slo.get(key)
    return [] if value is None else [("objective", 1000 * value)]


def _ms(value_s: float) -> str:
    return f"{1000 * value_s:.1f}"


def _charts(charts: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(chart.html() for chart in charts)}</div>'


def _table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    def line(cells: Row, tag: str) -> str:
        shown = (escape("-" if cell is None else cell) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in shown)}</tr>"

    head = line(columns, "th") if any(columns) else ""
    return f'<div class="scroll"><table>{head}{"".join(line(row, "td") for row in rows)}</table></div>'


def _page(title: str, result: Mapping[str, Any], body: Sequence[str]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(result["began"]))
    config = result.get("config")
    settings = ""
    if config:
        rows = [(name, str(value)) for name, value in config.items()]
        settings = f"<details><summary>All settings</summary>{_table(('', ''), rows)}</details>"
    where = f"{config['url']}, " if config else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_CSP}"><style>{_STYLE}</style></head><body>'
        f'<h1>{escape(title)}</h1><p class="sub">{escape(where + when)}</p>{"".join(body)}{settings}</body></html>\n'
    )
