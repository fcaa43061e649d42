"""Configures logging, by default to standard error, one line per event. Called once, in the main thread, before any log line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, cast

from common.base.log_limits import LimitedHandler
from common.base.output import Output

LogFormat = Literal["text", "json"]

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_LIBRARIES = ("httpx", "httpcore", "urllib3", "huggingface_hub", "asyncio", "filelock", "uvicorn", "fsspec", "redis")
"""Libraries whose messages below a warning do not help an operator. At debug some of them show headers, with their keys."""

_recent: deque[str] = deque(maxlen=1000)
"""The latest log lines of this process, for operators; process-wide like logging itself."""


def configure(level: str, form: LogFormat = "text", write: Callable[[str], None] | None = None) -> None:
    """Log messages of at least `level` (debug, info, warning, error) to standard error, or with `write`, which gets them
    without the last line end. Replaces any earlier configuration."""
    formatter = JsonFormatter() if form == "json" else TextFormatter(_FORMAT, datefmt="%H:%M:%S")
    limited = LimitedHandler([_Passing(write or _standard_error()), _Passing(_recent.append)])
    limited.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [limited]
    root.setLevel(level.upper())
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


def recent() -> list[str]:
    """The latest log lines, oldest first."""
    return list(_recent)


class TextFormatter(logging.Formatter):
    """Formats a message as one line, whatever it quotes; only the traceback of a bug follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _one_line(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Formats a message as one line of JSON: time, level, logger, message; `request_id` and `attempt` if the message names an
    attempt; `error` with the traceback of a bug."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_attempt(record.args),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Passing(logging.Handler):
    """Passes each formatted message, which has several lines if it has a traceback, to a function. Messages that the function
    cannot write are lost."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: standard error is closed
            self._write(self.format(record))


def _standard_error() -> Callable[[str], None]:
    output = Output(sys.stderr)
    return lambda text: output.write(text + "\n")


def _attempt(args: Any) -> dict[str, Any]:
    """Fields of the attempt (`common.control.identities.AttemptKey`) among a message's arguments; empty if there is none."""
    for arg in cast("tuple[Any, ...]", args) if isinstance(args, tuple) else ():
        if hasattr(arg, "request_id") and hasattr(arg, "attempt"):
            return {"request_id": arg.request_id, "attempt": arg.attempt}
    return {}


def _one_line(message: str) -> str:
    if message.isprintable():
        return message
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)
