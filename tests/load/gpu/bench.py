"""`make gpu-bench`: measures on a card what is promised of one, prints one table and writes JSON. Nothing fails here.

    scripts/gpu-bench [--only decode,relay] [--dry-run] [--json FILE]

The two limits come first; every figure stands beside one of them, or beside a peer of the same run. --dry-run
goes through all lines on a processor with tiny sizes: its figures mean nothing, its code is what runs on a card.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from load.command import Run, end_by_exception, make_parser, parse  # noqa: E402
from load.results import Result  # noqa: E402

LINES = ("limits", "decode", "prefill", "relay", "peer", "ttft", "hidden", "interference")
"""In order of running: those that share a running system are neighbours."""


def _arguments() -> argparse.Namespace:
    parser = make_parser("gpu-bench", __doc__, LINES)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a processor: shows that it works")
    return parse(parser, LINES)


def main() -> int:
    """Measure the chosen lines. Returns 1 if one of them broke; a missed target breaks nothing."""
    arguments = _arguments()
    end_by_exception()
    from load.gpu import lines
    from load.gpu.session import GpuSession

    session = GpuSession(arguments.dry_run)

    def line(name: str) -> Result:
        try:
            return getattr(lines, name)(session)
        except Exception:
            session.stop_system()  # the next one begins with one of its own
            raise

    run = Run(session.about, session.results)
    try:
        for name in [name for name in LINES if name in arguments.only]:
            run.measure(name, lambda name=name: line(name))
    finally:
        session.stop_system()
    return run.conclude(arguments.json, _title(run.about))


def _title(about: dict[str, Any]) -> str:
    where = "dry run on a processor, figures mean nothing" if about["dry_run"] else about["card"]
    return f"{time.strftime('%Y-%m-%d')}: {where}, torch {about['torch']}, flashinfer {about['flashinfer-python']}"


if __name__ == "__main__":
    sys.exit(main())
