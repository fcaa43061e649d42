"""Writes a file whole or not at all. Any thread."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file. After an error, as on a full disk, what was there before stays, and nothing if there was none; but for
    pipes and devices, and in folders where this user may only change the file.

    Raises: OSError.
    """
    target = path.resolve()
    if not os.access(target.parent, os.W_OK) or (target.exists() and not target.is_file()):
        target.write_bytes(content)
        return
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        new.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
