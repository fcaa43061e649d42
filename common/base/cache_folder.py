"""The per-user folder for files that can be built again: native kernels and packed weights."""

from __future__ import annotations

import os
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
