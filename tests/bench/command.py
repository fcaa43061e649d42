"""What the benchmark commands share: choosing by name, measuring one after the other, one table, JSON."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.results import Result, print_table, save
from rich.console import Console


def make_parser(prog: str, description: str | None, names: Collection[str]) -> argparse.ArgumentParser:
    """A parser with --only and --json; the caller adds its own."""
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of: {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results into one file as well")
    return parser


def parse(parser: argparse.ArgumentParser, names: Collection[str]) -> argparse.Namespace:
    """The arguments, `only` as a list of names: all of `names` unless some were asked for."""
    arguments = parser.parse_args()
    arguments.only = [name for name in arguments.only.split(",") if name] or list(names)
    for name in arguments.only:
        if name not in names:
            parser.error(f"no benchmark is called {name!r}; there are {', '.join(names)}")
    return arguments


def end_by_exception() -> None:
    """On SIGTERM, so that the processes of a run are ended in order."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


class Incomplete(Exception):
    """A benchmark broke after it had measured something; raise it from what broke it."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"{result.bench} broke after {len(result.figures)} figures")
        self.result = result


@dataclass
class Run:
    """One command's results. If a benchmark breaks, all figures measured so far are kept, its own included; a missed
    target is not a failure."""

    about: dict[str, Any]
    """The machine and what was measured with."""
    folder: Path
    """Where <name>.json goes."""
    console: Console = field(default_factory=lambda: Console(width=None if sys.stdout.isatty() else 150))
    results: list[Result] = field(default_factory=list[Result])
    broken: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])
    """Names of benchmarks for which no time was left."""

    def measure(self, name: str, bench: Callable[[], Result]) -> None:
        """Run one benchmark and write its JSON."""
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')} measuring {name}[/dim]", highlight=False)
        started = time.monotonic()
        try:
            result = bench()
        except Exception as error:
            traceback.print_exc()
            self.broken.append(name)
            if not isinstance(error, Incomplete) or not error.result.figures:
                return
            result = error.result
        result.details["took_s"] = round(time.monotonic() - started, 1)
        self.results.append(result)
        save(result, self.about, self.folder)

    def conclude(self, whole_json: Path | None, title: str = "") -> int:
        """Print the table, and write all into `whole_json`. Returns the exit status: 1 if one broke."""
        print_table(self.results, self.about, self.console, title=title)
        self.console.print(f"JSON: {self.folder}/<name>.json", highlight=False)
        if self.broken:
            self.console.print(f"[red]could not be measured, or not whole: {', '.join(self.broken)}[/red]")
        if self.left_out:
            self.console.print(f"[yellow]left out, there was no time left: {', '.join(self.left_out)}[/yellow]")
        if whole_json is not None:
            results = [result.as_json() for result in self.results]
            whole = {"machine": self.about, "broken": self.broken, "left_out": self.left_out, "results": results}
            whole_json.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        return 1 if self.broken else 0
