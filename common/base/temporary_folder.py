"""Where temporary files go, also on a full disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def temporary_folder() -> Path:
    """That of `tempfile`. On a full disk, where `tempfile` finds none as it tries to write a file: $TMPDIR or /tmp.

    So `kvrelay admin` still finds a cluster, and what cannot be written fails with its own name and reason.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - files in it are made by `tempfile`
