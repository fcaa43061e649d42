"""A JSON list of the processes of `kvrelay up`, for scripts that need to find them."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from common.base.errors import ConfigError
from common.base.files import write_whole


@dataclass(frozen=True)
class PidEntry:
    """One running process; `role` is redis, router, prefill, decode or pooling."""

    name: str
    role: str
    pid: int
    address: str
    """Empty until a restarted process has one."""


class PidFile:
    """The file at `path`; None: no file. It is replaced atomically, so readers see the old list or the new one.

    Raises: ConfigError if the file cannot be written.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None and self._path.is_dir():
            raise ConfigError(f"cannot write the pid file {path}: it is a folder")
        if self._path is not None and not (self._path.parent.is_dir() and os.access(self._path.parent, os.W_OK)):
            raise ConfigError(f"cannot write the pid file {path}: {self._path.parent} is not a writable folder")

    def write(self, entries: list[PidEntry]) -> None:
        """Replace the list."""
        if self._path is not None:
            write_whole(self._path, (json.dumps([asdict(entry) for entry in entries], indent=2) + "\n").encode())

    def remove(self) -> None:
        """Remove the file, if it is there."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # a disk that became read-only
                self._path.unlink(missing_ok=True)
