"""Bounds what a process logs: lines of one kind, lines about one peer, and characters of quoted text.

A peer that sends nonsense must not fill a disk, hide other lines, or make logging cost more time than its message did.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from common.base.sentences import counted

WINDOW_S = 10.0
PER_PEER, PER_KIND = 5, 100
"""Maximum lines of one kind (one place in the code) in a window: about one peer, if the record names it
(`extra={"peer": ...}`), and in all."""
MAX_QUOTED_CHARS, MAX_CHARS = 200, 2000
"""Maximum characters of one argument of a warning or error, and of a whole message."""


class LimitedHandler(logging.Handler):
    """Passes records on to `handlers` within the bounds, and logs once per window how many lines were left out."""

    def __init__(self, handlers: Sequence[logging.Handler], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._handlers, self._clock = handlers, clock
        self._began_s = clock()
        self._lines: Counter[tuple[str, ...]] = Counter()
        self._left_out: Counter[tuple[str, str]] = Counter()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on, or count it as left out. The caller holds the handler's lock."""
        if self._clock() >= self._began_s + WINDOW_S:
            self._report()
        if record.levelno >= logging.INFO and not self._fits(record):
            return
        _cut(record)
        self._pass(record)

    def _fits(self, record: logging.LogRecord) -> bool:
        kind = (record.name, str(record.msg)[:MAX_QUOTED_CHARS])
        peer = str(getattr(record, "peer", ""))[:MAX_QUOTED_CHARS]
        if self._lines[kind] < PER_KIND and (not peer or self._lines[*kind, peer] < PER_PEER):
            self._lines.update([kind, (*kind, peer)])
            return True
        self._left_out[kind] += 1
        if self._timer is None or not self._timer.is_alive():  # a fork does not copy its thread
            self._timer = threading.Timer(WINDOW_S, self._report_later)
            self._timer.daemon = True
            self._timer.start()
        return False

    def _report_later(self) -> None:
        assert self.lock is not None
        with self.lock:
            self._report()

    def _report(self) -> None:
        """Log what the past window left out, and begin a new one."""
        left_out, self._left_out = self._left_out, Counter()
        self._lines.clear()
        self._began_s = self._clock()
        for (name, message), count in left_out.items():
            text = "left out %s like this one: %s"
            self._pass(logging.LogRecord(name, logging.WARNING, "", 0, text, (counted(count, "line"), message), None))

    def _pass(self, record: logging.LogRecord) -> None:
        for handler in self._handlers:
            handler.handle(record)

    def setFormatter(self, fmt: logging.Formatter | None) -> None:
        """Set the formatter of all handlers."""
        for handler in self._handlers:
            handler.setFormatter(fmt)


def _cut(record: logging.LogRecord) -> None:
    if record.levelno >= logging.WARNING and isinstance(record.args, tuple):
        record.args = tuple(_shortened(arg, MAX_QUOTED_CHARS) for arg in cast("tuple[Any, ...]", record.args))
    try:
        message = record.getMessage()
    except Exception:  # the arguments do not fit the message; this bug must not become an error of the caller
        message = record.msg = f"{record.msg} (its arguments do not fit)"
        record.args = ()
    if len(message) > MAX_CHARS:
        record.msg, record.args = _shortened(message, MAX_CHARS), ()


def _shortened(arg: Any, limit: int) -> Any:
    if isinstance(arg, str) and len(arg) > limit:
        return f"{arg[:limit]}... ({len(arg)} characters)"
    if isinstance(arg, bytes) and len(arg) > limit:
        return arg[:limit] + b"..."
    return arg
