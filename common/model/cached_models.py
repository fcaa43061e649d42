"""The models whose packed weights are kept on this machine. No torch.

`common.model.packed_weights` writes them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from common.base.cache_folder import cache_folder
from common.base.files import locked, try_lock

NAME = "name"
"""A file of each model: how its name is shown."""
IN_USE = "in-use"
"""A file of each model; every process that maps files of the model holds a shared lock on it."""


def weights_folder() -> Path:
    """The cache's folder of packed weights. Raises: ConfigError."""
    return cache_folder() / "weights"


@dataclass(frozen=True)
class CachedModel:
    """The packed weights of one model."""

    folder: Path
    size_bytes: int
    used_at: float
    """Unix time, in seconds, at which a process last opened it."""

    @property
    def name(self) -> str:
        """The model's name in the API; that of the folder where it was packed without one."""
        try:
            return (self.folder / NAME).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return self.folder.name

    def remove(self) -> bool:
        """Remove it unless a process uses it. Returns whether it is gone. Raises: OSError."""
        try:
            descriptor = os.open(self.folder / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return True
        try:
            if not try_lock(descriptor) or not is_still(descriptor, self.folder / IN_USE):
                return False
            # A process that opens or removes it meanwhile finds all of it or nothing.
            removed = self.folder.with_name(f"removed-{secrets.token_hex(8)}")
            self.folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
            return True
        finally:
            os.close(descriptor)

    @property
    def is_in_use(self) -> bool:
        """Whether a process maps it."""
        with contextlib.suppress(FileNotFoundError), locked(self.folder / IN_USE, 0.0) as is_held:
            return not is_held
        return False


def is_still(descriptor: int, file: Path) -> bool:
    """Whether the open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def cached_models(folder: Path) -> list[CachedModel]:
    """The models of the cache in `folder`, least recently used first."""
    found: list[CachedModel] = []
    with contextlib.suppress(FileNotFoundError):
        for model in folder.iterdir():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                sizes = [entry.stat().st_size for entry in os.scandir(model)]
                in_use = model / IN_USE
                used_at = (in_use if in_use.exists() else model).stat().st_mtime
                found.append(CachedModel(model, sum(sizes), used_at))
    return sorted(found, key=lambda each: each.used_at)
