"""The folder for temporary files, also on a full disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def temporary_folder() -> Path:
    """The folder that `tempfile` chooses; on a full disk, where it chooses none, $TMPDIR or /tmp.

    So `kvrelay admin` still finds a cluster, and a failed write names its own file and reason.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - files in it are made by `tempfile`
