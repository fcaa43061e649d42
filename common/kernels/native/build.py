"""Finds the compiled native kernels."""

from __future__ import annotations

import os
from pathlib import Path

OVERRIDE = "KVRELAY_NATIVE_LIBRARY"
"""Environment variable: the path of the library to load."""


def find_library() -> Path | str:
    """The library's path, or why there is none."""
    path = os.environ.get(OVERRIDE)
    return Path(path) if path else f"{OVERRIDE} names none"
