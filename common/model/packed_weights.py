"""Weights that are packed once and shared: files that all nodes and ranks of this host map, one copy in memory.

    <cache>/weights/<weights>-<code>/    one model, of one digest of its weights and one of the code that packs
        in-use                           locked, shared, by every process that maps files of the model
        <stripe>.lock                    locked by a process that packs
        <digest of the key>              a file of `common.model.packed_file`
        <digest of the key>.part         the same while it is written

Used by a rank's main thread while it loads. Files are never changed, only removed: those of models that no process
uses, least recently used first, where the cache would exceed its limit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from common.base.errors import ConfigError
from common.base.files import locked, try_lock, write_whole
from common.base.variables import CACHE
from common.model.cached_models import IN_USE, NAME, cached_models, is_still, weights_folder
from common.model.packed_file import PackedTensors, map_packed, write_packed

log = logging.getLogger(__name__)

_CODE = ("model", "kernels")
"""Folders below common/ whose code decides what is packed, and how."""
_LIBRARIES = ("transformers", "gguf", "torch")
"""Packages that decide it too: they rename, merge and widen weights."""
PackedT = TypeVar("PackedT", PackedTensors, PackedTensors | None)

_STRIPES = 16
_PART = ".part"
_WAIT_S = 60.0
"""How long to wait for another process that packs the same weights, before packing them for this process alone."""
_OPEN_S = 5.0
_FREE_PART = 0.25
"""Default limit: this part of the disk space that is free or taken by the cache."""


class PackedWeights:
    """The packed weights of one model, in use by this process until `close`."""

    def __init__(
        self,
        folder: Path,
        weights: str,
        limit_gb: float | None,
        is_current: Callable[[], bool] = lambda: True,
        name: str = "",
    ) -> None:
        """`folder`: of all models. `weights`: a digest of the weights. `limit_gb`: of all models; None: by the free disk space.
        `is_current`: whether the files still hold these weights. `name`: how the model is listed.

        Raises: OSError.
        """
        self._models = folder
        self._limit_gb = limit_gb
        self._is_current = is_current
        self._folder = folder / f"{weights}-{_code_digest()}"
        self._in_use = self._open()
        self._is_stopped = False
        if name:
            write_whole(self._folder / NAME, name.encode())
        self._remove_parts()
        for other in cached_models(folder):  # packed by other code
            if other.folder != self._folder and other.folder.name.startswith(f"{weights}-"):
                other.remove()

    def _open(self) -> int:
        """The descriptor that holds the lock on `in-use`. Raises: OSError."""
        deadline_s = time.monotonic() + _OPEN_S
        file = self._folder / IN_USE
        while True:
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # it vanishes meanwhile
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                if try_lock(descriptor, shared=True) and is_still(descriptor, file):
                    os.utime(descriptor)
                    return descriptor
                os.close(descriptor)  # a process that removes the model has it
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self._folder} is being removed")
            time.sleep(0.01)

    def _remove_parts(self) -> None:
        """Remove the files of packers that were killed. Raises: OSError."""
        for part in self._folder.glob("[0-9a-f]" * 32 + _PART):
            with locked(self._stripe(part.stem), 0.0) as is_held:
                if is_held:
                    part.unlink(missing_ok=True)

    def _stripe(self, digest: str) -> Path:
        """The lock that a process holds while it packs this file."""
        return self._folder / f"{int(digest, 16) % _STRIPES}.lock"

    def close(self) -> None:
        """From now on the model may be removed; what is mapped stays."""
        os.close(self._in_use)

    def get(self, key: str, make: Callable[[], PackedT]) -> PackedTensors | PackedT:
        """The tensors of `key`, shared with other processes; made by `make` and written where the cache does not have them. `make`
        may return None for what cannot be shared.

        What is made is private to this process, with a line in the log, where it cannot be written or another process
        takes too long to pack it. Raises: what `make` raises.
        """
        digest = hashlib.sha256(key.encode()).hexdigest()[:32]
        file = self._folder / digest
        try:
            found = map_packed(file, key)
            if found is not None or self._is_stopped:
                return found or make()
            with locked(self._stripe(digest), time.monotonic() + _WAIT_S) as is_held:
                found = map_packed(file, key)
                if found is not None:
                    return found
                if not is_held:
                    log.warning("packed weights: another process took over %.0f s; not shared: %s", _WAIT_S, key)
                    return make()
                made = make()
                return (None if made is None else self._write(file, key, made)) or made
        except OSError as error:
            self._stop(str(error))
            return make()

    def _write(self, file: Path, key: str, made: PackedTensors) -> PackedTensors | None:
        part = file.with_suffix(_PART)
        try:
            if not self._make_room(made.size_bytes):
                self._stop("the cache is full (--packed-cache-gb)")
                return None
            write_packed(part, key, made)
            if not self._is_current():
                raise OSError("the checkpoint's files were changed while they were read")
            part.replace(file)
            return map_packed(file, key)
        except (OSError, ConfigError) as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            self._stop(str(error))
            return None

    def _stop(self, reason: str) -> None:
        if not self._is_stopped:
            log.warning("packed weights are kept in this process's own memory from here on: %s", reason)
        self._is_stopped = True

    def _make_room(self, size_bytes: int) -> bool:
        """Remove models until `size_bytes` more fit. Returns whether they do. Raises: OSError."""
        models = cached_models(self._models)
        total = sum(model.size_bytes for model in models)
        limit_gb = self._limit_gb
        free = shutil.disk_usage(self._models).free
        limit = _FREE_PART * (free + total) if limit_gb is None else limit_gb * 2**30
        for model in models:
            if total + size_bytes <= limit:
                break
            if model.folder != self._folder and model.remove():
                log.info("packed weights: removed a model of %.2f GB that no process uses", model.size_bytes / 1e9)
                total -= model.size_bytes
        return total + size_bytes <= limit


def open_packed_weights(
    fingerprint: str, state: str, limit_gb: float | None, is_current: Callable[[], bool], name: str = ""
) -> PackedWeights | None:
    """The packed weights of the model with this fingerprint, whose files have this state (`files_state`) as long as
    `is_current`; `name`: how it is listed. None, with a line in the log, where they cannot be kept, and if `limit_gb` is 0."""
    if limit_gb == 0:
        return None
    weights = hashlib.sha256(f"{fingerprint}\0{state}".encode()).hexdigest()[:24]
    try:
        return PackedWeights(weights_folder(), weights, limit_gb, is_current, name)
    except (OSError, ConfigError) as error:
        advice = f"; {CACHE} can name another folder" if isinstance(error, OSError) else ""
        log.warning("packed weights are not shared with other processes: %s%s", error, advice)
        return None


@functools.cache
def _code_digest() -> str:
    digest = hashlib.sha256()
    for file in _code_files():
        digest.update(file.read_bytes())
    for library in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            digest.update(f"\0{library} {version(library)}".encode())
    return digest.hexdigest()[:12]


def _code_files() -> Iterator[Path]:
    common = Path(__file__).parent.parent
    for folder in _CODE:
        yield from sorted((common / folder).rglob("*.py"))
