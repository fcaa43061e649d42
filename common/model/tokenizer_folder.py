"""Where the files of a model's tokenizer are: in its folder, in the one of `--tokenizer`, or written from a GGUF file. No torch."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

from common.base.cache_folder import cache_folder
from common.base.errors import ConfigError
from common.base.files import write_whole
from common.model.hub import is_gguf, model_folder, resolve_tokenizer

_lock = threading.Lock()
"""Held while files are written: `write_whole` is for one thread of a process."""


def tokenizer_folder(path: Path, tokenizer: str | None = None) -> Path:
    """The directory that holds tokenizer.json and what belongs to it, of the model at `path` (from `resolve_model`).

    `tokenizer`: the operator's choice. A GGUF file's own tokenizer is written to the cache, unless there is a tokenizer.json
    beside the file. Raises: ConfigError if a GGUF file's tokenizer cannot be read or written.
    """
    if tokenizer:
        return resolve_tokenizer(tokenizer)
    folder = model_folder(path)
    return folder if not is_gguf(path) or (folder / "tokenizer.json").is_file() else _written(path)


def written_tokenizers() -> Path:
    """The cache's folder of tokenizers. Raises: ConfigError."""
    return cache_folder() / "tokenizers"


def _written(path: Path) -> Path:
    """The folder of the tokenizer of a GGUF file. It is written once for each content and code that reads it."""
    # Imported here because it costs a fifth of a second, which other models need not pay.
    from common.model.gguf import tokenizer
    from common.model.gguf.file import open_gguf

    file = open_gguf(path)
    digest = hashlib.sha256(Path(tokenizer.__file__).read_bytes())
    digest.update(file.header.raw)
    folder = written_tokenizers() / digest.hexdigest()[:24]
    last = "tokenizer.json"
    if (folder / last).is_file():
        return folder
    contents = tokenizer.tokenizer_files(file)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock:
            for name in sorted(contents, key=lambda name: name == last):
                write_whole(folder / name, json.dumps(contents[name], ensure_ascii=False).encode())
    except OSError as error:
        raise ConfigError(f"cannot write the tokenizer of {path} to {folder}: {error.strerror}") from error
    return folder
