"""Finds the folder for temporary files, even on a full disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def temporary_folder() -> Path:
    """Return the folder that `tempfile` chooses, or $TMPDIR or /tmp if it chooses none because the disk is full.

    With it `kvrelay admin` still finds a cluster, and a failed write names its own file and reason.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - files in it are made by `tempfile`
