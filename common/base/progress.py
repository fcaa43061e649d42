"""Progress of a long command on standard error: a bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 5.0
_REFRESH_S = 0.25


class LiveProgress:
    """Shows the share that is done, the time, and what `details` says, until the block ends.

    The share is that of `total` items, or of `duration_s`, whichever is larger; without both there is none.
    """

    def __init__(
        self,
        title: str,
        *,
        total: int | None = None,
        duration_s: float = 0.0,
        details: Callable[[], str] = str,
        completed: int = 0,
    ) -> None:
        self._title = title
        self._total = total
        self._duration_s = duration_s
        self._details = details
        self._done = completed
        self._start_s = time.monotonic()
        self._ended = threading.Event()
        self._bar: Progress | None = None
        in_terminal = Console(stderr=True).is_terminal
        work = self._refresh if in_terminal else self._print_lines
        if in_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._task = self._bar.add_task(title, total=1.0 if self.share() is not None else None)
        self._thread = threading.Thread(target=work, name="progress", daemon=True)

    def advance(self) -> None:
        """One more item is done."""
        self._done += 1

    def share(self) -> float | None:
        """The share that is done, 0 to 1; None if nothing says how much there is."""
        shares = [self._done / self._total] if self._total else []
        if self._duration_s:
            shares.append((time.monotonic() - self._start_s) / self._duration_s)
        return min(1.0, max(shares)) if shares else None

    def line(self) -> str:
        """The progress in one line."""
        share, elapsed_s = self.share(), time.monotonic() - self._start_s
        percent = "" if share is None else f" {100 * share:.0f} %"
        of = f" of {self._total}" if self._total else ""
        details = self._details()
        return (
            f"{self._title}:{percent} after {elapsed_s:.0f} s, {self._done}{of} done{', ' + details if details else ''}"
        )

    def __enter__(self) -> LiveProgress:
        if self._bar is not None:
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            print(self.line(), file=sys.stderr, flush=True)

    def _refresh(self) -> None:
        assert self._bar is not None
        while not self._ended.wait(_REFRESH_S):
            self._bar.update(self._task, completed=self.share() or 0.0, description=self._description(), refresh=True)

    def _description(self) -> str:
        of = f"/{self._total}" if self._total else ""
        details = self._details()
        return f"{self._title}, {self._done}{of}{', ' + details if details else ''}"
