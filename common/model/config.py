"""The config of a model directory: `config.json` and `generation_config.json`, checked once.

Used by every process, the router included; pure, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from common.base.errors import ConfigError
from common.model.config_file import ConfigFile, architectures, read_generation_config, read_json_object
from common.model.description import (
    USUAL_ENDS,
    USUAL_NAMES,
    EndsDescription,
    ExpertNames,
    LayerDescription,
    MixtureDescription,
    NormDescription,
    WeightNames,
)
from common.model.draft_head_description import DraftHeadDescription
from common.model.families.base import Family
from common.model.families.registry import FAMILIES, with_head
from common.model.formats.quantization import Quantization, parse_quantization
from common.model.hub import is_gguf, model_folder

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


class UnknownArchitecture(ConfigError):
    """No native family has the architecture."""

    def __init__(self, message: str, architecture: str) -> None:
        super().__init__(message)
        self.architecture = architecture


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model; everything that building and running it needs."""

    architecture: str
    hidden_size: int
    layers: tuple[LayerDescription, ...]
    """First to last."""
    final_norm: NormDescription
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    """Dtype of the weights in the files."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: Quantization | None = None
    """How linear layers' weights are stored; None: all in `dtype`."""
    weight_names: WeightNames = USUAL_NAMES
    ends: EndsDescription = USUAL_ENDS
    mtp_layer: LayerDescription | None = None
    """The layer after the last one, which the checkpoint has for multi-token prediction; None: it has no such layer, or several."""
    draft_head: DraftHeadDescription | None = None
    """The head that the node guesses tokens with; it is not among `layers`."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_context(self) -> int:
        """The longest context, in tokens, that the model was made for."""
        return self.max_position_embeddings

    def for_context(self, max_model_len: int) -> ModelConfig:
        """The same model for contexts of at most this many tokens, on which some rotary embeddings depend."""
        layers = tuple(layer.for_context(max_model_len) for layer in self.layers)
        head = None if self.draft_head is None else self.draft_head.for_context(max_model_len)
        return replace(self, layers=layers, draft_head=head)

    def check_split(self, tp_size: int, pp_size: int) -> None:
        """Refuse a number of ranks that cannot share the layers. Raises: ConfigError."""

    def fit_context(self, max_model_len: int | None) -> int:
        """`max_model_len` if the model can serve it; None asks for the longest possible.

        Raises: ConfigError if it is beyond the model's positions.
        """
        if max_model_len is None:
            return self.max_context
        if max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1, got {max_model_len}")
        if max_model_len > self.max_context:
            raise ConfigError(
                f"max_model_len {max_model_len} is above the model's max_position_embeddings of {self.max_context}; "
                "ask for at most that"
            )
        return max_model_len

    def resolve_dtype(self, requested: str) -> str:
        """`requested`, or the files' own dtype for "auto".

        Raises: ConfigError for an unknown dtype.
        """
        dtype = self.dtype if requested == "auto" else requested
        if dtype not in SUPPORTED_DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; known: auto, {', '.join(SUPPORTED_DTYPES)}")
        return dtype


def load_model_config(path: Path, *, headless: bool = False) -> ModelConfig:
    """The config of the model in directory or GGUF file `path`.

    `headless`: it needs no LM head; it may also be of a family's class without one (`Qwen3Model`). Raises: ConfigError, one
    sentence, for a missing or corrupt file, an unsupported architecture or feature.
    """
    if is_gguf(path):
        # Imported here because it costs a fifth of a second, which other models need not pay.
        from common.model.gguf.architectures import GGUF_EXPERT_NAMES
        from common.model.gguf.config import gguf_architecture, read_gguf_config
        from common.model.gguf.file import open_gguf

        gguf = open_gguf(path)
        raw = ConfigFile(path, read_gguf_config(gguf))
        config = _describe(raw, model_folder(path), gguf_architecture(gguf).names)
        layers = tuple(_with_expert_names(layer, GGUF_EXPERT_NAMES) for layer in config.layers)
        return replace(config, layers=layers)
    file = path / "config.json"
    return _describe(ConfigFile(file, _with_head(read_json_object(file)) if headless else None), path, None)


def _with_expert_names(layer: LayerDescription, names: ExpertNames) -> LayerDescription:
    is_mixture = isinstance(layer.mlp, MixtureDescription)
    return replace(layer, mlp=replace(layer.mlp, expert_names=names)) if is_mixture else layer


def _with_head(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the class with an LM head, for that of one without."""
    return {**raw, "architectures": [with_head(name) or name for name in architectures(raw)]}


def _describe(config: ConfigFile, folder: Path, weight_names: WeightNames | None) -> ModelConfig:
    _, generation = read_generation_config(folder)
    architecture, family = _find_family(config)
    if family.nested_config is not None:
        config = config.with_nested(family.nested_config)
    config = config.with_defaults(family.config_defaults).renamed(family.config_keys)
    names = weight_names or _also_headless(family.weight_names)
    quantization = _read_quantization(config)
    if quantization is not None and names.is_transposed:
        raise config.error(f"quantized weights of {architecture} are not supported")
    layers = family.describe(config)
    return ModelConfig(
        architecture=architecture,
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        final_norm=layers[-1].norm,
        vocab_size=config.integer("vocab_size"),
        tie_word_embeddings=config.flag("tie_word_embeddings", family.default_tied),
        max_position_embeddings=_max_position(config, family, layers[0]),
        dtype=str(config.raw.get("dtype") or config.raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=token_ids(config, generation, "eos_token_id"),
        bos_token_id=next(iter(token_ids(config, generation, "bos_token_id")), None),
        quantization=quantization,
        weight_names=names,
        ends=family.describe_ends(config),
        mtp_layer=layers[-1] if family.has_mtp and config.count("num_nextn_predict_layers", 0) == 1 else None,
    )


def _also_headless(names: WeightNames) -> WeightNames:
    """`names`, also without their first part: checkpoints of a class without an LM head do not have it, as in transformers."""
    first_part = names.embedding.partition(".")[0] + "."
    return replace(names, other_beginnings=(*names.other_beginnings, (first_part, "")))


def _max_position(config: ConfigFile, family: Family, layer: LayerDescription) -> int:
    """`max_position_embeddings`, which linear scaling of positions multiplies and YaRN extends."""
    own, rope = config.integer("max_position_embeddings", family.default_max_position), layer.rope
    if rope is None or rope.kind not in ("linear", "yarn"):
        return own
    return int(rope.factor * own) if rope.kind == "linear" else max(own, int(rope.factor * rope.original_max_position))


def _find_family(config: ConfigFile) -> tuple[str, Family]:
    names = architectures(config.raw)
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    known = ", ".join(FAMILIES)
    unsupported = config.error(f"architecture {names or 'is not given, so it'} is not supported; supported: {known}")
    raise UnknownArchitecture(unsupported.message, names[0] if names else "none is named")


def _read_quantization(config: ConfigFile) -> Quantization | None:
    # Older files of compressed-tensors use the second name.
    raw = config.raw.get("quantization_config", config.raw.get("compression_config"))
    try:
        return parse_quantization(raw)
    except ValueError as error:
        raise config.error(str(error)) from None


def token_ids(config: ConfigFile, generation: dict[str, Any], key: str) -> tuple[int, ...]:
    """The ids under `key`; those in generation_config.json take precedence over config.json."""
    for source in (generation, config.raw):
        value = source.get(key)
        if value is None:
            continue
        ids = cast("list[Any]", value) if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise config.error(f"{key} {value!r} is not a token id or a list of them")
        return tuple(ids)
    return ()
