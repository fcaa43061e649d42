"""The comparison as text: its section of the documents, and its JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.peers import goodput, report
from bench.peers.comparison import Options, Samples
from bench.peers.systems import KvRelay, System
from bench.results import finite
from bench.shape import SHAPES

from common.base.errors import ConfigError

BEGIN, END = "<!-- bench-peers: begin -->", "<!-- bench-peers: end -->"

_HOW = """\
Every system serves the same random weights in bfloat16 over HTTP to the same client, one system after the other, with
all cores and its default options except those listed. Medians, rounds: {rounds}. In brackets: how many times better
kvrelay is (a higher rate, a shorter time), the median of the ratios within each round. Bounds of one decode step are
reading all weights once, or their products; of a prompt its arithmetic; at the rates measured in the same round ({limits})."""
_GOODPUT = """\
{mix}; Poisson arrivals. A request counts if its first token comes within {ttft:g} s and later ones take at most {tpot:g}
ms each on average. Cells: requests/s that count (share of all), p99 between tokens. A system is not measured at higher
rates once fewer than {hopeless:.0%} count."""
_PLACEMENTS = {
    "shared cores": "On one shared set of cores:",
    "two hosts": (
        "On two hosts with one core each (network namespaces; the client and kvrelay's router beside them on both): "
        "a prefill and a decode node; two decode nodes; two vLLM servers that get half of the requests each:"
    ),
}


def _titles(systems: Mapping[str, System]) -> dict[str, str]:
    return {system.name: system.title for system in [*systems.values(), KvRelay(prefill=0)]}


def tables(samples: Samples, systems: Mapping[str, System]) -> dict[str, list[list[str]]]:
    """Every table by its caption."""
    titles = _titles(systems)
    found: dict[str, list[list[str]]] = {}
    for shape, rounds in samples.figures.items():
        if any(any(figures) for figures in rounds.values()):
            found[f"Shape {shape}"] = report.table(SHAPES[shape], samples.limits[shape], rounds, titles)
    for placement, points in samples.goodput.items():
        found[_PLACEMENTS[placement]] = goodput.table(points, titles)
    return found


def write_section(samples: Samples, options: Options, about: Mapping[str, Any], systems: Mapping[str, System]) -> str:
    """The documents' section, in Markdown, without the markers."""
    limits = [found for by_shape in samples.limits.values() for found in by_shape]
    words = report.bounds_in_words(limits) if limits else "not measured"
    parts = [f"{about['cpu']}, {about['cores']} cores, PyTorch {about['torch']}."]
    parts.append(_HOW.format(rounds=options.rounds, limits=words))
    parts.append("\n".join(f"- {system.title}: {system.options}" for system in systems.values()))
    every = tables(samples, systems)
    parts += [report.markdown(rows) for caption, rows in every.items() if caption.startswith("Shape")]
    if samples.goodput:
        parts.append("### Is disaggregation worth it here?")
        mix = "; ".join(f"{share:.0%} of the requests {prompt} -> {out} tokens" for share, prompt, out in goodput.MIX)
        objectives = options.objectives
        parts.append(
            _GOODPUT.format(
                mix=mix, ttft=objectives.ttft_s, tpot=1e3 * objectives.tpot_s, hopeless=goodput.HOPELESS_SHARE
            )
        )
        for placement in samples.goodput:
            parts += [_PLACEMENTS[placement], report.markdown(every[_PLACEMENTS[placement]])]
    if samples.left_out:
        parts.append("Left out:")
        parts.append("\n".join(f"- {what}: {reason}" for what, reason in samples.left_out.items()))
    return "\n\n".join(_wrapped(part) for part in parts)


def _wrapped(part: str) -> str:
    """Prose in lines that fit; tables and headings as they are."""
    import textwrap

    if part.startswith(("|", "#")):
        return part
    lines = part.split("\n- ") if part.startswith("- ") else [part]
    if len(lines) > 1 or part.startswith("- "):
        items = [line.removeprefix("- ") for line in lines]
        return "\n".join(textwrap.fill(item, 120, initial_indent="- ", subsequent_indent="  ") for item in items)
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)


def replace_section(page: str, section: str) -> str:
    """`page` with the text between the markers replaced. Raises: ConfigError if it has no markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page has no markers {BEGIN} and {END} to write between")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


def as_json(samples: Samples, about: Mapping[str, Any], systems: Mapping[str, System]) -> dict[str, Any]:
    """Everything that was measured, as plain data; what is not a number becomes null."""
    return {
        "machine": dict(about),
        "systems": {system.name: f"{system.title}: {system.options}" for system in systems.values()},
        "limits": {shape: [asdict(found) for found in limits] for shape, limits in samples.limits.items()},
        "figures": {
            shape: {
                system: [{key: finite(value) for key, value in figures.items()} for figures in rounds]
                for system, rounds in by_system.items()
            }
            for shape, by_system in samples.figures.items()
        },
        "goodput": {
            placement: {
                system: [
                    {key: finite(value) if isinstance(value, float) else value for key, value in asdict(p).items()}
                    for p in points
                ]
                for system, points in by_system.items()
            }
            for placement, by_system in samples.goodput.items()
        },
        "left_out": dict(samples.left_out),
    }
