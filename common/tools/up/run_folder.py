"""The folder with the files of one `kvrelay up`: certificates, a copy of the configuration, Redis' data."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from common.base.file_lock import try_lock


@contextlib.contextmanager
def run_folder() -> Generator[Path]:
    """A new folder below the temporary folder, removed at the end.

    Children that are restarted after weeks still read it, so it is locked: systemd-tmpfiles, which removes old files from
    /tmp, leaves locked folders alone. $XDG_RUNTIME_DIR would be no better place: it ends when the user logs out.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-up-"))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try_lock(descriptor, shared=True)
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
