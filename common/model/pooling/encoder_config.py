"""Configuration of encoders that pool: the BERT family, as sentence-transformers and transformers keep them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from common.base.errors import ConfigError
from common.control.messages import Task
from common.model.config_file import ConfigFile, architectures, as_object, first_architecture
from common.model.pooling.sentence_transformers import Pooling, max_seq_length, noted_activation, read_pooling

ScoreActivation = Literal["sigmoid", "identity"]
_ACTIVATIONS: dict[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
_PREFIXES = {"Bert": "bert.", "Roberta": "roberta.", "XLMRoberta": "roberta."}
_SUFFIXES: dict[str, Task] = {"Model": "embed", "ForSequenceClassification": "score"}
ARCHITECTURES: dict[str, Task] = {family + suffix: task for family in _PREFIXES for suffix, task in _SUFFIXES.items()}
"""The supported classes of transformers, and what they do."""


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder and how its vectors are pooled."""

    task: Task
    is_roberta: bool
    weight_prefix: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    num_positions: int
    padding_id: int | None
    """RoBERTa: the padding token, which has the position of its own id, also within a text; the others count from the next one.
    None: positions are places."""
    num_types: int
    norm_eps: float
    activation: Literal["gelu", "gelu_tanh", "relu"]
    max_model_len: int
    pooling: Pooling = "mean"
    score_activation: ScoreActivation = "sigmoid"
    """Activation that turns a cross-encoder's output into a score."""

    def with_context(self, max_model_len: int) -> EncoderConfig:
        """The config for inputs of at most this many tokens. Raises: ConfigError if the model takes fewer."""
        if max_model_len > self.max_model_len:
            raise ConfigError(
                f"max_model_len {max_model_len} is more than the {self.max_model_len} that the model takes"
            )
        return replace(self, max_model_len=max_model_len)


def is_encoder(path: Path) -> bool:
    """Whether the model in this folder is a supported encoder."""
    return first_architecture(path) in ARCHITECTURES


def read_encoder_config(path: Path) -> EncoderConfig:
    """The encoder in folder `path`. Raises: ConfigError for a missing or wrong file, or an unsupported feature."""
    config = ConfigFile(path / "config.json")
    name = architectures(config.raw)[0]
    task = ARCHITECTURES[name]
    family = name.removesuffix("Model").removesuffix("ForSequenceClassification")
    if config.flag("is_decoder", False):
        raise config.error("is_decoder, with which tokens see only those before them, is not supported")
    if config.raw.get("position_embedding_type") not in (None, "absolute"):
        raise config.error(f"position_embedding_type {config.raw['position_embedding_type']!r} is not supported")
    labels = config.raw.get("id2label")
    num_labels = len(cast("dict[str, Any]", labels)) if isinstance(labels, dict) else config.integer("num_labels", 2)
    if task == "score" and num_labels != 1:
        raise config.error(f"a cross-encoder has one label, this model {num_labels}: classifiers are not supported")
    activations = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
    activation = activations.get(str(config.raw.get("hidden_act", "gelu")))
    if activation is None:
        raise config.error(f"hidden_act {config.raw['hidden_act']!r} is not supported")
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise config.error(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"no tokenizer.json in {path}; routers need a fast tokenizer file there")
    positions = config.integer("max_position_embeddings")
    padding_id = config.count("pad_token_id", 1) if family != "Bert" else None
    return EncoderConfig(
        task=task,
        is_roberta=family != "Bert",
        weight_prefix=_PREFIXES[family],
        hidden_size=hidden_size,
        num_layers=config.num_layers(),
        num_heads=num_heads,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        num_positions=positions,
        padding_id=padding_id,
        num_types=config.integer("type_vocab_size", 2),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=cast("Any", activation),
        max_model_len=min(_places(config, positions, padding_id), max_seq_length(path, positions)),
        pooling=read_pooling(path, "mean"),
        score_activation=_score_activation(config, noted_activation(path)) if task == "score" else "sigmoid",
    )


def _places(config: ConfigFile, positions: int, padding_id: int | None) -> int:
    """Tokens of the longest text that has a position for each. Raises: ConfigError if there is none."""
    places = positions if padding_id is None else positions - padding_id - 1
    if places < 1:
        raise config.error(f"max_position_embeddings {positions} leaves no position behind pad_token_id {padding_id}")
    return places


def _score_activation(config: ConfigFile, newest: str | None) -> ScoreActivation:
    """The activation that sentence-transformers has noted: `newest`, or in config.json under its newer or its older name.

    Raises: ConfigError.
    """
    newer = as_object(config.raw.get("sentence_transformers")).get("activation_fn")
    name = newest or newer or config.raw.get("sbert_ce_default_activation_function") or "Sigmoid"
    found = _ACTIVATIONS.get(str(name).rpartition(".")[2])
    if found is None:
        raise config.error(f"the cross-encoder's activation {name!r} is not supported; {', '.join(_ACTIVATIONS)} are")
    return found
