"""Logging to standard error, configured once in the main thread before anything logs."""

from __future__ import annotations

import logging
import sys
from collections import deque

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_CHATTY = ("httpx", "httpcore", "urllib3", "huggingface_hub", "asyncio", "filelock")
"""Libraries whose info messages do not help an operator."""


_recent: deque[str] = deque(maxlen=1000)
"""The latest log lines of this process, for operators; process-wide like logging itself."""


class _Recent(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _recent.append(self.format(record))


def recent() -> list[str]:
    """The latest log lines, oldest first."""
    return list(_recent)


def configure(level: str) -> None:
    """Log messages of at least `level` (debug, info, warning, error); replaces any earlier configuration."""
    handlers = [logging.StreamHandler(sys.stderr), _Recent()]
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(level.upper())
    if level != "debug":
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
