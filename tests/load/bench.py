"""`make bench`: measures what the project promises, prints one table and writes JSON. Not a test: nothing fails here.

    python tests/load/bench.py [--only decode_single,relay] [--quick] [--json FILE]

Every figure stands beside a limit of the machine or a peer that was measured in the same run, because machines
differ and drift; where a ratio is asked for, it is the median of interleaved pairs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]

BENCHES = {
    "limits": "load.limits:run",
    "decode_single": "load.decode:run_single",
    "decode_batch": "load.decode:run_batch",
    "prefill": "load.prefill:run",
    "engine_overhead": "load.overhead:run",
    "interference": "load.interference:run",
    "relay": "load.relay:run",
    "router": "load.router_cost:run",
    "pipeline": "load.pipeline:run",
    "transports": "load.transports:run",
    "overlap": "load.overlap:run",
}
"""In order of running: neighbours share processes."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of: {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it works, for rough figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results into one file as well")
    parser.add_argument(
        "--favor",
        default="balanced",
        metavar="MODE,...",
        help="for interference: of itl, balanced, ttft (default: balanced)",
    )
    parser.add_argument(
        "--arrival-s", type=float, default=10.0, metavar="S", help="for interference: seconds between long prompts"
    )
    parser.add_argument(
        "--shape",
        default="0.5b",
        choices=["0.5b", "tiny"],
        help="the model's shape; tiny only shows that the script runs",
    )
    arguments = parser.parse_args()
    arguments.only = [name for name in arguments.only.split(",") if name] or list(BENCHES)
    arguments.favors = tuple(arguments.favor.split(","))
    for name in arguments.only:
        if name not in BENCHES:
            parser.error(f"no benchmark is called {name!r}; there are {', '.join(BENCHES)}")
    for favor in arguments.favors:
        if favor not in ("itl", "balanced", "ttft"):
            parser.error(f"--favor {favor!r} is none of itl, balanced, ttft")
    return arguments


def main() -> int:
    """Run the chosen benchmarks. Returns 1 if one of them broke; a missed target breaks nothing."""
    arguments = _arguments()
    # As an exception, so that the processes of the run are ended in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]
    from load.results import print_table, save
    from load.session import Options, Session
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    options = Options(arguments.shape, arguments.quick, arguments.favors, arguments.arrival_s)
    session = Session(options)
    results, broken = [], []
    try:
        about = session.about()
        for name in [name for name in BENCHES if name in arguments.only]:
            console.print(f"[dim]{time.strftime('%H:%M:%S')} measuring {name}[/dim]", highlight=False)
            started = time.monotonic()
            try:
                result = _load(BENCHES[name])(session)
            except Exception:  # one broken benchmark does not take the others' figures with it
                traceback.print_exc()
                broken.append(name)
                continue
            result.details["took_s"] = round(time.monotonic() - started, 1)
            results.append(result)
            save(result, about, session.results)
    finally:
        session.close()
    print_table(results, about, console)
    console.print(f"JSON: {session.results}/<name>.json", highlight=False)
    if broken:
        console.print(f"[red]could not be measured: {', '.join(broken)}[/red]")
    if arguments.json is not None:
        whole = {"machine": about, "broken": broken, "results": [result.as_json() for result in results]}
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    return 1 if broken else 0


def _load(place: str) -> Callable[[Any], Any]:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    sys.exit(main())
