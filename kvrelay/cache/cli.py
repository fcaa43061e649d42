"""`kvrelay cache`: what is kept on this machine to start faster, and its removal."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from common.base.cache_folder import cache_folder
from common.base.errors import ConfigError
from common.config.cli import command_group
from common.kernels.native.build import clear_libraries, native_folder
from common.model.cached_models import CachedModel, cached_models, weights_folder
from common.model.tokenizer_folder import written_tokenizers

_HELP = """List or remove what kvrelay keeps on this machine to start faster: compiled native kernels, packed weights, which nodes
on this machine share, and tokenizers of GGUF files.

Everything here can be made again. The folder is $KVRELAY_CACHE, by default ~/.cache/kvrelay.
"""

app = command_group("cache", _HELP)


@app.command("list")
def list_cache() -> None:
    """List the compiled kernels and the models whose packed weights are kept."""
    print(cache_folder())
    try:
        print(f"{_megabytes(_size_bytes(native_folder()))}  native kernels")
        if written_tokenizers().exists():
            print(f"{_megabytes(_size_bytes(written_tokenizers()))}  tokenizers of GGUF files")
        for model in cached_models(weights_folder()):
            print(f"{_megabytes(model.size_bytes)}  packed weights {_describe(model)}")
    except (NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"cannot list the cache: {error}") from error


@app.command("clear")
def clear() -> None:
    """Remove everything but the packed weights that a running node uses, and native kernels that are being compiled."""
    try:
        for model in cached_models(weights_folder()):
            print(f"{'removed' if model.remove() else 'kept'} packed weights {_describe(model)}")
        if written_tokenizers().exists():
            shutil.rmtree(written_tokenizers())
            print("removed tokenizers of GGUF files")
        removed = clear_libraries()
        if removed is None:
            print("kept native kernels (being compiled)")
        elif removed:
            print("removed native kernels")
    except OSError as error:
        raise ConfigError(f"cannot clear the cache: {error}") from error


def _describe(model: CachedModel) -> str:
    state = "in use" if model.is_in_use else f"last used {(time.time() - model.used_at) / 3600:.1f} hours ago"
    name = "".join(char if char.isprintable() else "?" for char in model.name)
    return f"of {name} ({state})"


def _size_bytes(folder: Path) -> int:
    """Total size of the files in `folder`. Files that are deleted meanwhile are not counted."""
    size_bytes = 0
    for parent, _, names in os.walk(folder, onerror=_raise_unless_gone):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size_bytes += os.lstat(os.path.join(parent, name)).st_size
    return size_bytes


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:9.1f} MB"
