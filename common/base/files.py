"""Files that processes of one machine share: written whole or not at all, locked, in a folder with room. Any thread.

The kernel releases a lock when its process ends, even if it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path


def write_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file. After an error (such as a full disk) or an interruption the file is as it was before, or still missing.
    This does not hold for pipes and devices, nor in folders where this user may only change the file. `private`: only this
    user can read the file, whatever its permissions were; it is always replaced, as a write in place would keep them.

    Raises: OSError.
    """
    target = path.resolve()
    if not private and (not os.access(target.parent, os.W_OK) or (target.exists() and not target.is_file())):
        target.write_bytes(content)
        return
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        new.touch(mode=0o600 if private else 0o666)
        new.write_bytes(content)
        if target.exists() and not private:
            shutil.copymode(target, new)
        new.replace(target)
    finally:  # also after Ctrl-C
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def temporary_folder() -> Path:
    """Return the folder that `tempfile` chooses, or $TMPDIR or /tmp if it chooses none because the disk is full.

    With it `kvrelay admin` still finds a cluster, and a failed write names its own file and reason.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - files in it are made by `tempfile`


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
