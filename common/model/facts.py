"""What a router reads of a model's config, for native families and classes of transformers alike. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from common.base.errors import ConfigError
from common.model.config import load_model_config, token_ids
from common.model.config_file import ConfigFile, architectures, first_architecture, read_generation_config
from common.model.hub import is_gguf

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_ANY_CONTEXT = 2**20
"""Context where config.json gives none: nodes, which know the model's class, register their limit."""


class ModelFacts(NamedTuple):
    vocab_size: int
    max_context: int
    """The longest context that the model is made for, in tokens; nodes may serve less."""
    eos_token_ids: tuple[int, ...]
    architecture: str
    """The model's class in transformers, such as `LlamaForCausalLM`; empty if config.json names none."""


def read_facts(path: Path) -> ModelFacts:
    """The facts about the model in directory or GGUF file `path`.

    Raises: ConfigError, one sentence, for a missing or corrupt file.
    """
    try:
        config = load_model_config(path)
        return ModelFacts(config.vocab_size, config.max_context, config.eos_token_ids, config.architecture)
    except ConfigError:
        # A model that native families refuse may run by a class of transformers, which nodes know.
        if is_gguf(path):
            raise
        file = ConfigFile(path / "config.json")
    _, generation = read_generation_config(path)
    key = next((key for key in _POSITION_KEYS if file.raw.get(key) is not None), _POSITION_KEYS[0])
    return ModelFacts(
        file.integer("vocab_size"),
        file.integer(key, _ANY_CONTEXT),
        token_ids(file, generation, "eos_token_id"),
        next(iter(architectures(file.raw)), ""),
    )


def read_architecture(folder: Path) -> str:
    """`ModelFacts.architecture` of the model in a directory, of any kind; empty if its config.json cannot be read."""
    try:
        return first_architecture(folder)
    except ConfigError:
        return ""
