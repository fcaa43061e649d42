"""`make gpu-bench`: measures the goals for a GPU, prints one table and writes JSON. A missed goal is no failure.

    scripts/gpu-bench [--only decode,relay] [--budget-s 440] [--dry-run] [--json FILE]

The two limits are measured first; every figure is shown with one of them, or with a peer of the same run. Lines run in
order of importance. Lines for which not enough time is left are skipped and named at the end; a line that hangs is
ended, and the figures it has are kept. --dry-run runs all lines on a CPU with tiny sizes: its figures mean nothing, but
it runs the same code.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from bench.command import Incomplete, Run, end_by_exception, make_parser, parse  # noqa: E402
from bench.results import Result  # noqa: E402

LINES = {
    "limits": (10, 60),
    "decode": (40, 130),
    "decode_small": (20, 60),
    "prefill": (25, 80),
    "quantized": (60, 120),
    "relay": (20, 80),
    "ttft": (40, 110),
    "hidden": (10, 110),
    "interference": (60, 120),
    "peer": (60, 140),
    "peer_big": (80, 160),
}
"""Lines in order of importance; those that share a running system are neighbours. Values in seconds: a line starts only
if the first is left, and is ended after the second."""
_BUDGET_S = 440.0
"""Time limit of the lines. The whole command, including the set-up of its environment, must end within eight minutes."""
_ENDLESS_S = 1e6


def _arguments() -> argparse.Namespace:
    parser = make_parser("gpu-bench", __doc__, LINES)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a processor: shows that it works")
    parser.add_argument("--budget-s", type=float, help=f"seconds for all lines, {_BUDGET_S:g} on a GPU")
    arguments = parse(parser, LINES)
    if arguments.budget_s is None:
        arguments.budget_s = _ENDLESS_S if arguments.dry_run else _BUDGET_S
    return arguments


def main() -> int:
    """Measure the chosen lines. Returns 1 if one of them broke; a missed target breaks nothing."""
    arguments = _arguments()
    end_by_exception()
    from bench.gpu import lines
    from bench.gpu.session import GpuSession

    session = GpuSession(arguments.dry_run, arguments.budget_s)

    def line(name: str) -> Result:
        result = Result(name)
        try:
            getattr(lines, name)(session, result)
        except Exception as error:
            session.stop_system()  # the next one begins with one of its own
            raise Incomplete(result) from error
        return result

    def begin(name: str) -> bool:
        needed_s, at_most_s = LINES[name]
        return session.begin(needed_s, _ENDLESS_S if arguments.dry_run else at_most_s)

    begin("limits")  # they are measured here, whether they are shown or not
    run = Run(session.about, session.results)
    try:
        for name in LINES:
            if name not in arguments.only:
                continue
            if not begin(name):
                run.left_out.append(name)
                continue
            run.measure(name, lambda name=name: line(name))
    finally:
        session.stop_system()
    return run.conclude(arguments.json, _title(run.about))


def _title(about: dict[str, Any]) -> str:
    where = "dry run on a processor, figures mean nothing" if about["dry_run"] else about["GPU"]
    return f"{time.strftime('%Y-%m-%d')}: {where}, torch {about['torch']}, flashinfer {about['flashinfer-python']}"


if __name__ == "__main__":
    sys.exit(main())
