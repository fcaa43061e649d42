"""Linear layers of the native kernels whose packed weights are shared with other processes. Used while a rank loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from common.kernels.native.library import NativeLibrary
from common.kernels.native.linear import NativeLinear, PackedWeight
from common.model.formats.base import Linear
from common.model.packed_file import PackedTensors
from common.model.packed_weights import PackedWeights

_TENSORS = ("weight", "scale", "zero")


def shared_linears(
    weights: PackedWeights,
    native: NativeLibrary,
    key: str,
    biases: Sequence[Tensor | None],
    make: Callable[[], Sequence[Linear]],
) -> Sequence[Linear]:
    """The layers of `key`, which one file holds, each with its bias ([out], which is not shared). `make` reads and packs their
    weights, and is called only if no process has done so before. If the native kernels lack one of the layers, all are
    returned as `make` makes them."""
    made: Sequence[Linear] | None = None

    def pack() -> PackedTensors | None:
        nonlocal made
        made = make()
        packed = [linear.packed for linear in made if isinstance(linear, NativeLinear)]
        return _tensors_of(packed) if len(packed) == len(made) else None

    found = weights.get(key, pack)
    if found is not None:
        return [NativeLinear(native, _packed_of(found, index), bias) for index, bias in enumerate(biases)]
    assert made is not None
    return made


def _tensors_of(packed: Sequence[PackedWeight]) -> PackedTensors:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for index, weight in enumerate(packed):
        own = {name: tensor for name in _TENSORS if (tensor := getattr(weight, name)) is not None}
        tensors |= {f"{index}.{name}": tensor for name, tensor in own.items()}
        out, inputs = weight.shape
        facts = {"format": weight.format, "out": out, "in": inputs, "group": weight.group}
        facts["is_paired"] = int(weight.is_paired)
        numbers |= {f"{index}.{name}": number for name, number in facts.items()}
    return PackedTensors(tensors, numbers)


def _packed_of(found: PackedTensors, index: int) -> PackedWeight:
    """The layer of that number in the file."""
    numbers, tensors = found.numbers, found.tensors
    return PackedWeight(
        numbers[f"{index}.format"],
        (numbers[f"{index}.out"], numbers[f"{index}.in"]),
        tensors[f"{index}.weight"],
        bool(numbers[f"{index}.is_paired"]),
        tensors.get(f"{index}.scale"),
        tensors.get(f"{index}.zero"),
        numbers[f"{index}.group"],
    )
