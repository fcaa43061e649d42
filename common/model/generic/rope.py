"""Rotary embeddings of transformers' classes, made independent of the step.

Dynamic NTK and long-rope choose their frequencies by the longest position of a batch. A row's embedding must depend on
its own position alone, as cached keys are used by later steps and other nodes: the frequencies are those of the longest
context that is served, as in native families.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BY_LENGTH = ("dynamic", "longrope")
_FROZEN = "default"


def freeze_rotary(model: nn.Module, context: int, device: torch.device) -> None:
    """Let the rotary embeddings of `model` choose frequencies for `context` tokens, once."""
    last = torch.tensor([[context - 1]], device=device)
    anything = torch.zeros(1, device=device)
    module: Any
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        for layers, each in kind.items() if isinstance(kind, dict) else ((None, kind),):
            if _is_by_length(each):
                module(anything, last, *([] if layers is None else [layers]))
    ignore_lengths(model)


def ignore_lengths(model: nn.Module) -> None:
    """Let the rotary embeddings of `model` keep their frequencies whatever the positions are, which one without weights cannot
    read."""
    module: Any
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {layers: _FROZEN if _is_by_length(each) else each for layers, each in kind.items()}
        elif _is_by_length(kind):
            module.rope_type = _FROZEN


def has_rope_by_length(config: Any) -> bool:
    """Whether a rotary embedding of a model of this config has other frequencies for other lengths."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return any(_is_by_length(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict))


def longest_context(config: Any, max_position: int) -> int:
    """`max_position_embeddings` of a config, which linear scaling of positions multiplies and YaRN extends, as in native families.
    Layers that differ in their rotary embedding are not extended."""
    rope: dict[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), rope.get("factor") or 1.0
    if kind == "linear":
        return int(factor * max_position)
    return max(max_position, int(factor * rope["original_max_position_embeddings"])) if kind == "yarn" else max_position


def _is_by_length(kind: object) -> bool:
    return isinstance(kind, str) and any(each in kind for each in _BY_LENGTH)
