"""Writes a file whole or not at all. Any thread."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file. After an error (such as a full disk) or an interruption the file is as it was before, or still missing.
    This does not hold for pipes and devices, nor in folders where this user may only change the file.

    Raises: OSError.
    """
    target = path.resolve()
    if not os.access(target.parent, os.W_OK) or (target.exists() and not target.is_file()):
        target.write_bytes(content)
        return
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        new.write_bytes(content)
        if target.exists():
            shutil.copymode(target, new)
        new.replace(target)
    finally:  # also after Ctrl-C
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
