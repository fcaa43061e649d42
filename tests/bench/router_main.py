"""`make bench-router`: measures the router's goals, prints one table and writes JSON. A missed goal is no failure.

    python tests/bench/router_main.py [--only index,trace] [--quick] [--trace FILE] [--json FILE]

`trace` and `real_trace` need Mooncake's conversation trace, by --trace or MOONCAKE_TRACE; the project ships none.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from bench import router_brain, router_rates, router_real, router_trace  # noqa: E402
from bench.command import Run, end_by_exception, make_parser, parse  # noqa: E402
from bench.results import Result  # noqa: E402

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
    parser = make_parser("bench-router", __doc__, BENCHES)
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it works, for rough figures")
    parser.add_argument("--trace", type=Path, default=os.environ.get("MOONCAKE_TRACE"), metavar="FILE")
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="of the trace, for real_trace: the first N"
    )
    return parse(parser, BENCHES)


def _about(quick: bool) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "torch": "not used", "python": sys.version.split()[0], "quick": quick}


def main() -> int:
    """Run the chosen benchmarks. Returns 1 if one of them broke; a missed target breaks nothing."""
    arguments = _arguments()
    end_by_exception()
    run = Run(_about(arguments.quick), _ROOT / "bench-results" / "router")
    for name in arguments.only:
        if name in _NEED_TRACE and arguments.trace is None:
            run.console.print(f"[yellow]not measured: {name}: no --trace FILE[/yellow]")
            continue
        run.measure(name, lambda name=name: BENCHES[name](arguments))
    return run.conclude(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
