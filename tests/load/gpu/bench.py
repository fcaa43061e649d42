"""`make gpu-bench`: measures on a card what is promised of one, prints one table and writes JSON. Nothing fails here.

    scripts/gpu-bench [--only decode,relay] [--dry-run] [--json FILE]

The two limits come first; every figure stands beside one of them, or beside a peer of the same run. --dry-run
goes through all lines on a processor with tiny sizes: its figures mean nothing, its code is what runs on a card.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
LINES = ("limits", "decode", "prefill", "relay", "peer", "ttft", "hidden", "interference")
"""In order of running: those that share a running system are neighbours."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu-bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of: {', '.join(LINES)}")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a processor: shows that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results into one file as well")
    arguments = parser.parse_args()
    arguments.only = [name for name in arguments.only.split(",") if name] or list(LINES)
    for name in arguments.only:
        if name not in LINES:
            parser.error(f"no line is called {name!r}; there are {', '.join(LINES)}")
    return arguments


def main() -> int:
    """Measure the chosen lines. Returns 1 if one of them broke; a missed target breaks nothing."""
    arguments = _arguments()
    # As an exception, so that the processes of the run are ended in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]
    from load.gpu import lines
    from load.gpu.session import GpuSession
    from load.results import print_table, save
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    session = GpuSession(arguments.dry_run)
    about: dict[str, Any] = session.about
    results, broken = [], []
    try:
        for name in [name for name in LINES if name in arguments.only]:
            console.print(f"[dim]{time.strftime('%H:%M:%S')} measuring {name}[/dim]", highlight=False)
            started = time.monotonic()
            try:
                result = getattr(lines, name)(session)
            except Exception:  # one broken line does not take the others' figures with it
                traceback.print_exc()
                broken.append(name)
                session.stop_system()
                continue
            result.details["took_s"] = round(time.monotonic() - started, 1)
            results.append(result)
            save(result, about, session.results)
    finally:
        session.stop_system()
    print_table(results, about, console, title=_title(about))
    console.print(f"JSON: {session.results}/<name>.json", highlight=False)
    if broken:
        console.print(f"[red]could not be measured: {', '.join(broken)}[/red]")
    if arguments.json is not None:
        whole = {"machine": about, "broken": broken, "results": [result.as_json() for result in results]}
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    return 1 if broken else 0


def _title(about: dict[str, Any]) -> str:
    where = "dry run on a processor, figures mean nothing" if about["dry_run"] else about["card"]
    return f"{time.strftime('%Y-%m-%d')}: {where}, torch {about['torch']}, flashinfer {about['flashinfer-python']}"


if __name__ == "__main__":
    sys.exit(main())
