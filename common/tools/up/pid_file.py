"""The JSON list of what `kvrelay up` runs, for scripts that want to find and kill things."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from common.base.errors import ConfigError


@dataclass(frozen=True)
class PidEntry:
    """One running process; `role` is redis, router, prefill or decode."""

    name: str
    role: str
    pid: int
    address: str
    """Empty while a restarted process does not have one yet."""


class PidFile:
    """The file at `path`, or nothing at all if that is None. Readers see a whole list, the old or the new one.

    Raises: ConfigError if nothing can be written there.
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
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            temporary.write_text(json.dumps([asdict(entry) for entry in entries], indent=2) + "\n", "utf-8")
            temporary.replace(self._path)

    def remove(self) -> None:
        """Remove the file, if it is there."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
