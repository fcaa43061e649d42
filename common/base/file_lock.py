"""File locks between processes of one machine. The kernel releases a lock when its process ends, even if it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

_POLL_S = 0.01


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file unless another open file description holds a conflicting lock. Returns whether it is locked now."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(file: Path, deadline_s: float) -> Generator[bool]:
    """Hold the exclusive lock on `file` during the `with` block. The file is created if it is missing.

    Waits until `time.monotonic()` reaches `deadline_s`. Yields whether the lock is held. Raises: OSError.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not (is_held := try_lock(descriptor)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        yield is_held
    finally:
        os.close(descriptor)
