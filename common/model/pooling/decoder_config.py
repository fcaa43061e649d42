"""Configuration of decoders that pool, such as Qwen3-Embedding. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from common.base.errors import ConfigError
from common.control.messages import Task
from common.model.config import ModelConfig, load_model_config
from common.model.config_file import read_json_object
from common.model.description import MultiHeadDescription
from common.model.pooling.sentence_transformers import Pooling, max_seq_length, read_pooling


@dataclass(frozen=True)
class PoolingDecoderConfig:
    """A decoder-only model and how its vectors are pooled."""

    model: ModelConfig
    max_model_len: int
    pooling: Pooling
    task: Task = "embed"

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def with_context(self, max_model_len: int) -> PoolingDecoderConfig:
        """The config for inputs of at most this many tokens. Raises: ConfigError if the model takes fewer."""
        model = self.model.for_context(self.model.fit_context(max_model_len))
        return replace(self, model=model, max_model_len=max_model_len)


def read_pooling_decoder(path: Path) -> PoolingDecoderConfig:
    """The decoder in folder `path`, whose class may be one without an LM head.

    Raises: ConfigError for a missing or wrong file, or an unsupported feature.
    """
    raw = read_json_object(path / "config.json")
    if raw.get("use_bidirectional_attention") or raw.get("is_causal") is False:
        raise ConfigError(f"{path / 'config.json'}: a decoder whose attention is not causal is not supported")
    model = load_model_config(path, headless=True)
    for attention in {layer.attention for layer in model.layers}:
        if not isinstance(attention, MultiHeadDescription) or attention.soft_cap is not None:
            what = (
                f"{attention.kind} attention" if attention.kind != MultiHeadDescription.kind else "soft caps of scores"
            )
            raise ConfigError(f"{path / 'config.json'}: embeddings of a model with {what} are not supported")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"no tokenizer.json in {path}; routers need a fast tokenizer file there")
    longest = min(model.max_context, max_seq_length(path, model.max_context))
    return PoolingDecoderConfig(model.for_context(longest), longest, read_pooling(path, "lasttoken"))
