"""The per-user folder for files that can be built again: native kernels and packed weights."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from common.base.errors import ConfigError
from common.base.variables import CACHE


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return $KVRELAY_CACHE, else `kvrelay` below $XDG_CACHE_HOME or ~/.cache. The folder may not exist yet.

    Raises: ConfigError if $KVRELAY_CACHE is a relative path, or if neither a variable nor a home folder is set.
    """
    named = environ.get(CACHE)
    if named:
        if not os.path.isabs(named):
            raise ConfigError(f"{CACHE}={named} is not an absolute path")
        return Path(named)
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says that a relative path is ignored
        return Path(base) / "kvrelay"
    try:
        return Path.home() / ".cache" / "kvrelay"
    except RuntimeError as error:
        raise ConfigError(f"there is no home folder for the cache; {CACHE} can name one") from error


def writable_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder `name` of the cache, and make it if it is missing. If the cache cannot be written, for example because a
    random user id in a container has no home folder, return a folder of this user below the temporary folder.

    Raises: ConfigError that names the variable to set.
    """
    try:
        folder = cache_folder(environ) / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        why = f"{folder} cannot be written"
    except (OSError, ConfigError) as error:
        why = str(error)
    if environ.get(CACHE):
        raise ConfigError(f"{CACHE} must name a folder that can be written: {why}")
    spare = _spare_folder()
    try:
        spare.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(spare):
            raise ConfigError(f"{spare} is not a folder of this user alone")
        (spare / name).mkdir(mode=0o700, exist_ok=True)
    except (OSError, ConfigError) as error:
        raise ConfigError(f"no cache can be written ({why}; {error}); {CACHE} can name a folder") from error
    return spare / name


def readable_folders(name: str, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where the folder `name` of the cache may be, whether or not it can be written. Raises: as `cache_folder`, if there is none."""
    spare = _spare_folder()
    spares = [spare / name] if _is_private(spare) and not environ.get(CACHE) else []
    try:
        return [cache_folder(environ) / name, *spares]
    except ConfigError:
        if not spares:
            raise
        return spares


def _spare_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Whether only this user can write there: others could put libraries into it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
