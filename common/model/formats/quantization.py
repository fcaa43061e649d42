"""How a checkpoint stores its linear layers' weights, according to `quantization_config` in its config.json. No torch.

A new format is an entry in `METHODS`, which is without torch, and one in `common.model.formats.registry.FORMATS`. FP8
checkpoints are published in two ways: `quant_method` "fp8" (a scale for each tensor, or one for each block of
`weight_block_size`) and "compressed-tensors" (for each tensor, row or block). In all of them a stored number times its
scale is the weight, also where the scale's tensor is called `weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast


class Quantization:
    """A checkpoint's quantization settings; its kinds are frozen dataclasses, which a model's fingerprint covers."""


@dataclass(frozen=True)
class Fp8Quantization(Quantization):
    """Weights in e4m3; the dtype of each tensor says whether it is one of them."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None where a whole tensor or a row does."""


def parse_quantization(raw: Any) -> Quantization | None:
    """The settings in `quantization_config` of a config.json; None if there is none.

    Raises: ValueError saying what is not supported.
    """
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ValueError("quantization_config is not an object")
    config = cast("dict[str, Any]", raw)
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"the weights are quantized by {method!r}; supported: {', '.join(METHODS)}")
    return METHODS[method](config)


def _parse_fp8(config: dict[str, Any]) -> Fp8Quantization:
    fmt = config.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"the weights are stored as FP8 {fmt}; supported: e4m3")
    return Fp8Quantization(_block(config.get("weight_block_size")))


def _parse_compressed(config: dict[str, Any]) -> Fp8Quantization:
    """All groups must agree, so that it does not matter which layer is in which group."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("quantization_config has no config_groups")
    found: set[tuple[int, int] | None] = set()
    for group in cast("dict[str, Any]", groups).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ValueError("a group of quantization_config says nothing about weights")
        weights = cast("dict[str, Any]", weights)
        kind = f"{weights.get('type')}{weights.get('num_bits')}"
        strategy = weights.get("strategy")
        if kind != "float8" or strategy not in ("tensor", "channel", "block"):
            raise ValueError(
                f"the weights are quantized as {kind} by {strategy}; supported: float8 by tensor, channel or block"
            )
        found.add(_block(weights.get("block_structure")) if strategy == "block" else None)
    if len(found) > 1:
        raise ValueError("the groups of quantization_config differ in their block_structure")
    return Fp8Quantization(found.pop())


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sides = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"the blocks of the weights' scales are {value!r}, not two positive numbers")
    return sides[0], sides[1]


METHODS: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "fp8": _parse_fp8,
    "compressed-tensors": _parse_compressed,
}
"""Supported values of `quant_method`, each with what reads the rest of `quantization_config`. Raises: ValueError."""
