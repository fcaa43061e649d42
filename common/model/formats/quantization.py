"""How a checkpoint stores its linear layers' weights, according to `quantization_config` in its config.json. No torch.

A new format is an entry in `METHODS`, which is without torch, and one in `common.model.formats.registry.FORMATS`. Modules
that a checkpoint leaves unquantized need no list: each tensor's own name or dtype says how it is stored. FP8 checkpoints are published in two ways: `quant_method` "fp8" (a scale for each tensor, or one for each block of
`weight_block_size`) and "compressed-tensors" (for each tensor, row or block). In all of them a stored number times its
scale is the weight, also where the scale's tensor is called `weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from common.model.config_file import as_list, as_object


class Quantization:
    """A checkpoint's quantization settings; its kinds are frozen dataclasses, which a model's fingerprint covers."""


@dataclass(frozen=True)
class Fp8Quantization(Quantization):
    """Weights in e4m3; the dtype of each tensor says whether it is one of them."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None where a whole tensor or a row does."""


@dataclass(frozen=True)
class Int8Quantization(Quantization):
    """Weights in int8 with a scale for each output or tensor, activations rounded to int8."""


@dataclass(frozen=True)
class GroupQuantization(Quantization):
    """Weights in 4 or 8 bits with a scale and a zero for each group of inputs, packed in int32 words."""

    codes_name: ClassVar[str]
    """Last part of the name of the tensor that a linear layer has instead of `weight`."""
    order_name: ClassVar[str] = "g_idx"
    """Last part of the name of the tensor that says each input's group, if there is one."""
    group: int | None
    """Inputs that share a scale; None: all."""


@dataclass(frozen=True)
class AwqQuantization(GroupQuantization):
    """AWQ, in 4 bits, in the layout of its "gemm" kernels."""

    codes_name: ClassVar[str] = "qweight"


@dataclass(frozen=True)
class GptqQuantization(GroupQuantization):
    """GPTQ."""

    codes_name: ClassVar[str] = "qweight"
    bits: int
    zero_offset: int
    """Zero-point offset: added to a stored zero."""


@dataclass(frozen=True)
class PackedQuantization(GroupQuantization):
    """compressed-tensors, "pack-quantized"."""

    codes_name: ClassVar[str] = "weight_packed"
    order_name: ClassVar[str] = "weight_g_idx"
    bits: int
    is_symmetric: bool


@dataclass(frozen=True)
class Mxfp4Quantization(Quantization):
    """Stacked experts in e2m1, 4 bits, with a power of two for each 32 inputs; everything else is not quantized."""


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


def _parse_awq(config: dict[str, Any]) -> AwqQuantization:
    bits, version = config.get("bits", config.get("w_bit")), _layout(config, "version", "gemm")
    if config.get("backend") == "llm-awq":
        version = "llm-awq"
    if bits != 4 or version != "gemm":
        raise ValueError(f"the weights are stored as AWQ {version} in {bits!r} bits; supported: gemm in 4 bits")
    return AwqQuantization(_group(config.get("group_size", config.get("q_group_size"))))


def _parse_gptq(config: dict[str, Any]) -> GptqQuantization:
    bits, layout = config.get("bits"), _layout(config, "checkpoint_format", "gptq")
    if not isinstance(bits, int) or bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"the weights are stored as {layout} in {bits!r} bits; supported: gptq or gptq_v2 in 4 or 8 bits"
        )
    if config.get("dynamic"):
        raise ValueError(
            "the GPTQ weights have settings of their own for some layers (dynamic), which is not supported"
        )
    return GptqQuantization(_group(config.get("group_size")), bits, 1 if layout == "gptq" else 0)


def _parse_compressed(config: dict[str, Any]) -> Quantization:
    """The settings of all groups, which must agree, so that a layer's group does not matter."""
    if config.get("transform_config"):
        raise ValueError("the weights are stored rotated (transform_config), which is not supported")
    groups = as_object(config.get("config_groups"))
    if not groups:
        raise ValueError("quantization_config has no config_groups")
    found = [_parse_config_group(group, config.get("format")) for group in groups.values()]
    if any(each != found[0] for each in found):
        raise ValueError("the groups of quantization_config differ in how they store weights")
    return found[0]


def _parse_config_group(group: Any, default_layout: Any) -> Quantization:
    group = as_object(group)
    weights = as_object(group.get("weights"))
    if not weights:
        raise ValueError("a group of quantization_config says nothing about weights")
    bits: Any = weights.get("num_bits")
    strategy = weights.get("strategy")
    kind, layout = f"{weights.get('type')}{bits!r}", group.get("format") or default_layout
    is_symmetric = weights.get("symmetric", True) is True
    if kind == "float8" and strategy in ("tensor", "channel", "block"):
        return Fp8Quantization(_block(weights.get("block_structure")) if strategy == "block" else None)
    if layout == "pack-quantized" and kind in ("int4", "int8") and strategy in ("channel", "group"):
        return PackedQuantization(_group(weights.get("group_size") if strategy == "group" else -1), bits, is_symmetric)
    rounds_activations = isinstance(group.get("input_activations"), dict)
    if kind == "int8" and strategy in ("tensor", "channel") and is_symmetric and rounds_activations:
        return Int8Quantization()
    raise ValueError(
        f"the weights are quantized as {kind} by {strategy} ({layout}); supported: float8 by tensor, channel or block, "
        "symmetric int8 with int8 activations by tensor or channel, int4 and int8 by channel or group (pack-quantized)"
    )


def _layout(config: dict[str, Any], older: str, default: str) -> str:
    """How words are laid out: under the key `older`, else under `format`, as transformers reads them."""
    return str(config.get(older) or config.get("format") or default).lower()


def _group(value: Any) -> int | None:
    """The number of inputs that share a scale; None for -1, all of them."""
    if value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 8 or value % 8:
        raise ValueError(f"the weights' group_size is {value!r}, not -1 or a multiple of 8")
    return value


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sides = as_list(value)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"the blocks of the weights' scales are {value!r}, not two positive numbers")
    return sides[0], sides[1]


METHODS: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "fp8": _parse_fp8,
    "awq": _parse_awq,
    "gptq": _parse_gptq,
    "compressed-tensors": _parse_compressed,
    "mxfp4": lambda config: Mxfp4Quantization(),
}
"""Supported values of `quant_method`, each with what reads the rest of `quantization_config`. Raises: ValueError."""
