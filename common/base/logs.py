"""Logging to standard error, configured once in the main thread before anything logs."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_CHATTY = ("httpx", "httpcore", "urllib3", "huggingface_hub", "asyncio", "filelock")
"""Libraries whose info messages do not help an operator."""


def configure(level: str) -> None:
    """Log messages of at least `level` (debug, info, warning, error); replaces any earlier configuration."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level != "debug":
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
