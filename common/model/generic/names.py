"""Where a class of transformers keeps its parts: names of its modules. No part is read or changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from common.base.errors import ConfigError


@dataclass(frozen=True)
class PartNames:
    """Names of modules in the whole model."""

    trunk: str
    """What computes the final hidden states."""
    embedding: str
    lm_head: str
    layers: tuple[str, ...]
    others: tuple[str, ...]
    """All else, outside of layers: the final norm, learned positions, projections of embeddings."""


def find_parts(model: Any, attention: tuple[str, ...]) -> PartNames:
    """`attention`: names of the modules that attend, in the order of layers. Raises: ConfigError."""
    by_module = {module: name for name, module in model.named_modules()}
    name = type(model).__name__
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(lm_head) is not nn.Linear:
        raise ConfigError(f"{name} has another embedding or LM head than one matrix, which is not supported")
    layers = tuple(_layer_of(module) for module in attention)
    lists = {layer.rpartition(".")[0] for layer in layers}
    if len(lists) != 1 or len(set(layers)) != len(layers):
        raise ConfigError(f"{name} does not keep its layers in one list, which is not supported")
    own = {by_module[embedding], by_module[lm_head], *lists}
    return PartNames(
        trunk=by_module[_trunk(model)],
        embedding=by_module[embedding],
        lm_head=by_module[lm_head],
        layers=layers,
        others=tuple(_others(model, "", own)),
    )


def _trunk(model: Any) -> nn.Module:
    """The module whose output the LM head gets: the base model, or the decoder in it."""
    base = model.base_model
    decoder = getattr(base, "decoder", None)
    return decoder if isinstance(decoder, nn.Module) else base


def _layer_of(attention: str) -> str:
    """The layer's name: up to the last number in the name of its attention module."""
    parts = attention.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[: last + 1])


def _others(model: nn.Module, prefix: str, own: set[str]) -> list[str]:
    """The largest modules that hold none of `own`."""
    found: list[str] = []
    for child, _ in model.get_submodule(prefix).named_children():
        name = f"{prefix}.{child}" if prefix else child
        if name in own:
            continue
        if any(each.startswith(f"{name}.") for each in own):
            found += _others(model, name, own)
        else:
            found.append(name)
    return found
