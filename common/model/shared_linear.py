"""Linear layers of the native kernels whose packed weights are shared with other processes. Used while a rank loads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from common.kernels.native.library import NativeLibrary
from common.kernels.native.linear import NativeLinear, PackedWeight
from common.model.formats.base import Linear
from common.model.packed_file import PackedTensors
from common.model.packed_weights import PackedWeights

_TENSORS = ("weight", "scale", "zero")


def shared_linear(
    weights: PackedWeights, native: NativeLibrary, key: str, bias: Tensor | None, make: Callable[[], Linear]
) -> Linear:
    """The layer of `key`, with `bias` ([out], which is not shared). `make` reads and packs its weights, and is called only
    if no process has done so before. A layer that the native kernels do not have is returned as `make` makes it."""
    made: Linear | None = None

    def pack() -> PackedTensors | None:
        nonlocal made
        made = make()
        return _tensors_of(made.packed) if isinstance(made, NativeLinear) else None

    found = weights.get(key, pack)
    if found is not None:
        return NativeLinear(native, _packed_of(found), bias)
    assert made is not None
    return made


def _tensors_of(packed: PackedWeight) -> PackedTensors:
    tensors = {name: tensor for name in _TENSORS if (tensor := getattr(packed, name)) is not None}
    out, inputs = packed.shape
    numbers = {"format": packed.format, "out": out, "in": inputs, "group": packed.group}
    return PackedTensors(tensors, {**numbers, "is_paired": int(packed.is_paired)})


def _packed_of(found: PackedTensors) -> PackedWeight:
    numbers, tensors = found.numbers, found.tensors
    return PackedWeight(
        numbers["format"],
        (numbers["out"], numbers["in"]),
        tensors["weight"],
        bool(numbers["is_paired"]),
        tensors.get("scale"),
        tensors.get("zero"),
        numbers["group"],
    )
