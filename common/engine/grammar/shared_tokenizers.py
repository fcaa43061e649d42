"""Tokenizers for grammars that a process loads once for all nodes that it forks. Saves each node a second of processor time and
90 MB for a large vocabulary. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from common.base.errors import ConfigError
from common.engine.grammar.compile import load_tokenizer
from common.model.added_tokens import FILES, read_if_there
from common.model.facts import read_facts
from common.model.fingerprint import tokenizer_digest
from common.model.tokenizer_folder import tokenizer_folder

_Key = tuple[str, list[dict[str, Any]], int, tuple[int, ...]]
"""Digest of tokenizer.json, the contents of other files about tokens, size of the vocabulary, tokens that end an answer."""

_shared: dict[Path, tuple[_Key, LLTokenizer]] = {}
"""By folder. Changes in the process that forks only."""


def share_tokenizer(path: Path) -> None:
    """Load the tokenizer of the model in directory or GGUF file `path`, if that was not done or its file has changed. A model
    without a usable one is left to its nodes, which say what is wrong with it."""
    with contextlib.suppress(ConfigError):
        facts, folder = read_facts(path), tokenizer_folder(path)
        key = _key(folder, facts.vocab_size, facts.eos_token_ids)
        if folder not in _shared or _shared[folder][0] != key:
            _shared[folder] = key, load_tokenizer(folder, facts.vocab_size, facts.eos_token_ids)


def get_tokenizer(folder: Path, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """The tokenizer that was shared before this process was forked; without one, or if its
    files have changed, it is loaded here. Raises: ConfigError if it cannot be used."""
    eos_ids = tuple(eos_ids)
    if folder in _shared:
        key, tokenizer = _shared[folder]
        if key == _key(folder, vocab_size, eos_ids):
            return tokenizer
    return load_tokenizer(folder, vocab_size, eos_ids)


def _key(folder: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> _Key:
    return tokenizer_digest(folder), [read_if_there(folder / name) for name in FILES], vocab_size, eos_ids
