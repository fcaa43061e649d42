"""`make bench-peers`: serves the same random weights with kvrelay and with its peers, and compares them.

    scripts/bench-peers [--peers vllm,llama.cpp] [--shapes 33m] [--only one_stream,disaggregation] [--quick]

Each peer is installed into an environment of its own, once; one that cannot be installed or does not serve is named with
the reason and left out. Systems are served one after the other, in several rounds. Prints tables, writes JSON under
bench-results/ and, unless --quick, its section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from bench.command import end_by_exception, make_parser, parse  # noqa: E402
from bench.peers import section  # noqa: E402
from bench.peers.comparison import GOODPUT, Comparison, Options  # noqa: E402
from bench.peers.goodput import RATES, Objectives  # noqa: E402
from bench.peers.report import OURS  # noqa: E402
from bench.peers.rows import ROWS, ROWS_OF_SHAPE  # noqa: E402
from bench.peers.systems import every_system  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

_DOCS = _ROOT / "docs" / "benchmarks.md"
_RESULTS = _ROOT / "bench-results" / "peers.json"
_NAMES = (*ROWS, GOODPUT)


def _arguments() -> argparse.Namespace:
    peers = [name for name in every_system(Path()) if name != OURS]
    parser = make_parser("bench-peers", __doc__, _NAMES)
    parser.add_argument("--peers", default=",".join(peers), metavar="NAME,...", help=f"of: {', '.join(peers)}")
    parser.add_argument(
        "--shapes", default="33m,0.5b", metavar="NAME,...", help=f"of: {', '.join(ROWS_OF_SHAPE)} (default: 33m,0.5b)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of every system (default: 3)")
    parser.add_argument(
        "--rates",
        default=",".join(f"{rate:g}" for rate in RATES),
        metavar="R,...",
        help=f"for {GOODPUT}: requests/s, rising (default: %(default)s)",
    )
    parser.add_argument("--slo-ttft", type=float, default=Objectives.ttft_s, metavar="S", help="goodput objective")
    parser.add_argument("--slo-tpot", type=float, default=Objectives.tpot_s, metavar="S", help="goodput objective")
    parser.add_argument(
        "--cache",
        type=Path,
        default=_ROOT / ".bench-peers",
        metavar="FOLDER",
        help="environments, checkpoints and logs (default: .bench-peers)",
    )
    parser.add_argument("--install-only", action="store_true", help="install and convert, measure nothing")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that everything serves")
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="page to write the section into (default: docs/benchmarks.md)"
    )
    arguments = parse(parser, _NAMES)
    arguments.peers = [name for name in arguments.peers.split(",") if name]
    arguments.shapes = arguments.shapes.split(",")
    for name, known in [(n, peers) for n in arguments.peers] + [(n, list(ROWS_OF_SHAPE)) for n in arguments.shapes]:
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    try:
        arguments.rates = sorted(float(rate) for rate in arguments.rates.split(","))
    except ValueError:
        parser.error(f"--rates {arguments.rates!r} is not a list of numbers")
    if arguments.rounds < 1 or arguments.rates[0] <= 0:
        parser.error("--rounds and --rates must be positive")
    if arguments.docs and not arguments.docs.is_file():
        parser.error(f"--docs {arguments.docs} is not a file")
    return arguments


def main() -> int:
    """Compare. Returns 1 if kvrelay itself could not be measured as a whole."""
    arguments = _arguments()
    end_by_exception()
    options = Options(
        cache=arguments.cache.resolve(),
        peers=arguments.peers,
        shapes=arguments.shapes,
        only=arguments.only,
        rounds=1 if arguments.quick else arguments.rounds,
        rates=arguments.rates[:2] if arguments.quick else arguments.rates,
        objectives=Objectives(arguments.slo_ttft, arguments.slo_tpot),
        quick=arguments.quick,
    )
    console = Console(width=None if sys.stdout.isatty() else 200)
    comparison = Comparison(options, console)
    try:
        comparison.prepare()
        if arguments.install_only:
            return 0
        comparison.compare()
        comparison.judge_disaggregation()
        page = arguments.docs or (None if options.quick else _DOCS)
        if page is not None:
            written = section.write_section(comparison.samples, options, comparison.about, comparison.systems)
            page.write_text(section.replace_section(page.read_text("utf-8"), written), "utf-8")
    finally:  # an interrupted run keeps what it has
        comparison.close()
        if not arguments.install_only:
            _print(comparison, options, arguments.json, console)
    return int(any(what.startswith(OURS) for what in comparison.samples.left_out))


def _print(comparison: Comparison, options: Options, whole_json: Path | None, console: Console) -> None:
    """Tables to the console, everything as JSON into files."""
    samples = comparison.samples
    if options.quick:
        console.print("[yellow]--quick: shows that everything serves; the figures mean nothing[/yellow]")
    for caption, (header, *rows) in section.tables(samples, comparison.systems).items():
        printed = Table(*header, title=caption, title_justify="left")
        for row in rows:
            printed.add_row(*row)
        console.print(printed)
    for what, reason in samples.left_out.items():
        console.print(f"left out: {what}: {reason}", markup=False, highlight=False)
    text = json.dumps(section.as_json(samples, comparison.about, comparison.systems), indent=1) + "\n"
    for target in filter(None, (_RESULTS, whole_json)):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    console.print(f"JSON: {_RESULTS}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
