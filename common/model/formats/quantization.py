"""How a checkpoint stores quantized weights, by its config.json: e4m3 with scales, or not supported. Pure, no torch.

Two ways of writing the same thing are published: `quant_method` "fp8" (a scale for each tensor, or one for each block of
`weight_block_size`) and "compressed-tensors" (for each tensor, row or block). In all of them a stored number times its
scale is the weight, also where the scale's tensor is called `weight_scale_inv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

METHODS = ("fp8", "compressed-tensors")


@dataclass(frozen=True)
class Quantization:
    """Linear layers' weights in e4m3; which of them are, the files' tensors say themselves."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None where a whole tensor or a row does."""


def parse_quantization(raw: Any) -> Quantization | None:
    """What `quantization_config` of a config.json says; None for none.

    Raises: ValueError saying what is not supported.
    """
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ValueError("quantization_config is not an object")
    config = cast("dict[str, Any]", raw)
    method = config.get("quant_method")
    if method == "fp8":
        fmt = config.get("fmt", "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"the weights are stored as FP8 {fmt}; supported: e4m3")
        return Quantization(_block(config.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(config.get("config_groups"))
    raise ValueError(f"the weights are quantized by {method!r}; supported: {', '.join(METHODS)}, both of e4m3")


def _compressed(groups: Any) -> Quantization:
    """All groups must agree: which layer is of which is then without effect."""
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
    return Quantization(found.pop())


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sides = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"the blocks of the weights' scales are {value!r}, not two positive numbers")
    return sides[0], sides[1]
