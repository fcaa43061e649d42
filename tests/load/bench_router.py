"""`make bench-router`: what the router promises, measured; prints one table and writes JSON. Not a test: nothing fails here.

    python tests/load/bench_router.py [--only index,trace] [--quick] [--trace FILE] [--json FILE]

`trace` and `real_trace` need Mooncake's conversation trace, by --trace or MOONCAKE_TRACE; the project ships none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from load import router_brain, router_rates, router_real, router_trace  # noqa: E402
from load.results import Result, print_table, save  # noqa: E402
from rich.console import Console  # noqa: E402

BENCHES: dict[str, Callable[[argparse.Namespace], Result]] = {
    "index": lambda a: router_brain.index(a.quick, _ROOT / "bench-results" / "router" / "index.png"),
    "decisions": lambda a: router_brain.decisions(a.quick),
    "trace": lambda a: router_trace.run(a.trace, a.quick),
    "rates": lambda a: router_rates.measure(quick=a.quick),
    "recovery": lambda a: router_real.recovery(a.quick),
    "real_trace": lambda a: router_real.trace(a.trace, a.quick, a.requests),
}
_NEED_TRACE = ("trace", "real_trace")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-router", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of: {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it works, for rough figures")
    parser.add_argument("--trace", type=Path, default=os.environ.get("MOONCAKE_TRACE"), metavar="FILE")
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="of the trace, for real_trace: the first N"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results into one file as well")
    arguments = parser.parse_args()
    arguments.only = [name for name in arguments.only.split(",") if name] or list(BENCHES)
    for name in arguments.only:
        if name not in BENCHES:
            parser.error(f"no benchmark is called {name!r}; there are {', '.join(BENCHES)}")
    return arguments


def _about(quick: bool) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "torch": "not used", "python": sys.version.split()[0], "quick": quick}


def main() -> int:
    """Run the chosen benchmarks. Returns 1 if one of them broke; a missed target breaks nothing."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    console = Console(width=None if sys.stdout.isatty() else 150)
    about, results, broken = _about(arguments.quick), list[Result](), list[str]()
    folder = _ROOT / "bench-results" / "router"
    for name in arguments.only:
        if name in _NEED_TRACE and arguments.trace is None:
            console.print(f"[yellow]not measured: {name}: no --trace FILE[/yellow]")
            continue
        console.print(f"[dim]{time.strftime('%H:%M:%S')} measuring {name}[/dim]", highlight=False)
        try:
            result = BENCHES[name](arguments)
        except Exception:  # one broken benchmark does not take the others' figures with it
            traceback.print_exc()
            broken.append(name)
            continue
        results.append(result)
        save(result, about, folder)
    print_table(results, about, console)
    console.print(f"JSON: {folder}/<name>.json", highlight=False)
    if broken:
        console.print(f"[red]could not be measured: {', '.join(broken)}[/red]")
    if arguments.json is not None:
        whole = {"machine": about, "broken": broken, "results": [result.as_json() for result in results]}
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
