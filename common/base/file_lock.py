"""Locks on files between processes of one machine. The kernel releases a lock when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

_POLL_S = 0.01


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file if no other open file description excludes that. Returns whether it is locked now."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(file: Path, deadline_s: float) -> Generator[bool]:
    """Hold the exclusive lock on `file`, created if missing, during the block.

    Waits until `deadline_s` of `time.monotonic`. Yields whether the lock is held. Raises: OSError.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not (is_held := try_lock(descriptor)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        yield is_held
    finally:
        os.close(descriptor)
