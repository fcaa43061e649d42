"""Describes a model whose layers a class of transformers computes, or says why that is impossible.

Runs once in each process that plans a node, before weights are read.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from common.model.config import token_ids
from common.model.config_file import MOST_LAYERS, ConfigFile, architectures, read_generation_config
from common.model.description import LayerDescription, MlpDescription, MultiHeadDescription, NormDescription
from common.model.generic.config import STYLES, GenericConfig
from common.model.generic.library import load
from common.model.generic.names import find_parts
from common.model.generic.probe import AttentionCall, probe
from common.model.generic.rope import has_rope_by_length, longest_context
from common.model.hub import is_gguf

log = logging.getLogger(__name__)

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


def describe(path: Path) -> GenericConfig:
    """The model in directory `path`.

    Raises: ConfigError, one sentence, if transformers is missing or has no class for it, or if the class does what our
    attention or KV cache does not.
    """
    if is_gguf(path):
        raise ConfigError(f"{path}: transformers cannot run a GGUF file here; native families can")
    file = ConfigFile(path / "config.json")
    cls, config = read_class(path)
    _check_kinds(config, cls.__name__)
    _check_layers(config, file, cls.__name__)
    dtype = str(config.dtype or "float32").removeprefix("torch.")  # the model that is built next changes it
    model, calls = probe(cls, config)
    _check_parameters(model, file, cls.__name__)
    layers = _layers(cls.__name__, config, model, calls)
    find_parts(model, tuple(call.module for call in calls))
    _, generation = read_generation_config(path)
    embedding = model.get_input_embeddings()
    longest = longest_context(config, int(_of_text(config, "max_position_embeddings", cls.__name__)))
    return GenericConfig(
        architecture=cls.__name__,
        hidden_size=embedding.embedding_dim,
        layers=layers,
        final_norm=layers[-1].norm,
        vocab_size=embedding.num_embeddings,
        tie_word_embeddings=model.get_output_embeddings().weight is embedding.weight,
        max_position_embeddings=longest,
        dtype=dtype,
        eos_token_ids=token_ids(file, generation, "eos_token_id"),
        bos_token_id=next(iter(token_ids(file, generation, "bos_token_id")), None),
        config_digest=hashlib.sha256((path / "config.json").read_bytes()).hexdigest()[:32],
        v_head_dim=calls[0].v_dim,
        attention_modules=tuple(call.module for call in calls),
        sinks=tuple(call.sinks for call in calls),
        tp_plan=_tp_plan(model),
        has_stages=bool(model._pp_plan),
        context=longest,
        rope_by_length=has_rope_by_length(config),
    )


def read_class(path: Path) -> tuple[Any, Any]:
    """The class of the architecture that the config.json in `path` names, and its config object. Raises: ConfigError."""
    file = ConfigFile(path / "config.json")
    cls, config = _named_class(file), read_config(path)
    if type(config) is not cls.config_class:  # AutoConfig takes a Mistral with `layer_types` for a Ministral
        cls = load().MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), cls)
    if not cls._supports_attention_backend:
        raise file.error(
            f"the class {cls.__name__} of transformers does not use its attention interface, so its KV cannot be paged; "
            "architectures that do are listed in docs/models.md"
        )
    return cls, config


def _named_class(file: ConfigFile) -> Any:
    """The class of the architecture that config.json names. Raises: ConfigError."""
    name = next(iter(architectures(file.raw)), None)
    if name is None:
        raise file.error("it names no architecture")
    known = load("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if name not in {each for names in known for each in ([names] if isinstance(names, str) else names)}:
        why = "has code of its own, which is never run" if "auto_map" in file.raw else "is no decoder-only architecture"
        raise file.error(
            f"{name} {why} of transformers {load().__version__}; a native family or such an architecture works"
        )
    return getattr(load(), name)


def read_config(path: Path) -> Any:
    """The config object of transformers. Raises: ConfigError."""
    try:
        config = load().AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything
        first, _, rest = str(error).strip().partition("\n")
        reason = f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first
        raise ConfigError(f"{path / 'config.json'}: transformers cannot read it: {reason}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{path / 'config.json'}: quantized checkpoints need a native family; use one without quantization"
        )
    return config


def _check_kinds(config: Any, name: str) -> None:
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_KINDS
    if kinds:
        raise ConfigError(
            f"{name} has layers of kind {', '.join(sorted(kinds))}, and only full and sliding attention are implemented; "
            "architectures with these work"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; decoder-only architectures work")


def _check_layers(config: Any, file: ConfigFile, name: str) -> None:
    value = _of_text(config, "num_hidden_layers", name)
    if not isinstance(value, int) or not 1 <= value <= MOST_LAYERS:
        raise file.error(f"num_hidden_layers must be a whole number from 1 to {MOST_LAYERS}, not {value!r}")


def _check_parameters(model: Any, file: ConfigFile, name: str) -> None:
    for parameter, tensor in model.named_parameters():
        if not tensor.numel():
            raise file.error(f"it makes {parameter} of {name} a tensor of shape {list(tensor.shape)}, without numbers")


def _layers(name: str, config: Any, model: Any, calls: list[AttentionCall]) -> tuple[LayerDescription, ...]:
    modules = [call.module for call in calls]
    num_layers = _of_text(config, "num_hidden_layers", name)
    if len(set(modules)) != len(modules) or len(modules) != num_layers:
        raise ConfigError(
            f"{name} calls attention {len(modules)} times in {num_layers} layers; architectures whose every "
            "layer attends once work"
        )
    for call in calls:
        if call.soft_cap != calls[0].soft_cap:
            raise ConfigError(
                f"the layers of {name} differ in their soft cap of attention scores, which is not supported"
            )
        if call.num_q_heads % call.num_kv_heads:
            raise ConfigError(
                f"{name} has {call.num_q_heads} query heads, no multiple of its {call.num_kv_heads} KV heads"
            )
        if call.v_dim > call.k_dim:
            raise ConfigError(
                f"{name} has wider values ({call.v_dim}) than keys ({call.k_dim}), which is not supported"
            )
    if len({(call.num_q_heads, call.num_kv_heads, call.k_dim, call.v_dim) for call in calls}) > 1:
        raise ConfigError(f"the layers of {name} differ in their attention heads, which is not supported")
    if any(call.scale != calls[0].scale for call in calls):
        log.info("queries are multiplied by each layer's own scale of attention scores")
    if calls[0].v_dim < calls[0].k_dim:
        log.info(
            "values of %d numbers are padded to %d in the KV cache, as wide as keys", calls[0].v_dim, calls[0].k_dim
        )
    return tuple(_layer(call, model) for call in calls)


def _of_text(config: Any, key: str, name: str) -> Any:
    """A value of config.json, which may keep it with the text part of a model that also takes images."""
    value = getattr(config.get_text_config(), key, None)
    if value is None:
        raise ConfigError(f"the config of {name} has no {key}, which is not supported")
    return value


def _layer(call: AttentionCall, model: Any) -> LayerDescription:
    hidden = model.get_input_embeddings().embedding_dim
    attention = MultiHeadDescription(
        call.num_q_heads,
        call.num_kv_heads,
        call.k_dim,
        call.k_dim,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        has_sinks=call.sinks is not None,
    )
    layer = model.get_submodule(call.module.rpartition(".")[0])
    weights = sum(parameter.numel() for parameter in layer.parameters())
    heads = (call.num_q_heads + call.num_kv_heads) * 2 * call.k_dim
    inner = max(1, (weights // hidden - heads) // 2)
    return LayerDescription(attention, MlpDescription(inner, "silu", kind="plain"), NormDescription(1e-6))


def _tp_plan(model: Any) -> tuple[tuple[str, str], ...]:
    """Empty also if a style is not implemented."""
    plan = dict(model._tp_plan or {})
    if unknown := sorted(set(plan.values()) - STYLES):
        log.info("the tensor-parallel plan has styles that are not implemented: %s", ", ".join(unknown))
        return ()
    return tuple(plan.items())
