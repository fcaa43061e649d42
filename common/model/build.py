"""The inputs for building one rank's model, and reading exactly this rank's share of each weight.

Used by a rank's main thread while it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from common.base.device import CPU
from common.kernels.base import Kernels
from common.kernels.native.kernels import NativeKernels
from common.kernels.native.linear import NativeLinear, PackedWeight
from common.kernels.torch_kernels import TORCH
from common.kv.spec import KVPlane
from common.model.config import ModelConfig
from common.model.description import MlpDescription, MultiHeadDescription, WeightNames
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.floating import float_linear
from common.model.formats.int8 import make_int8_linear, quantize_int8
from common.model.formats.on_the_fly import WeightBits, quantize_linear
from common.model.packed_file import PackedTensors
from common.model.packed_weights import PackedWeights
from common.model.precision import FLOAT32, Precision
from common.model.sharding import HeadRange, even_range, head_range, vocab_range, vocab_rows
from common.model.tensor_files import Part
from common.model.weights import WeightSource
from common.parallel.mesh import SOLO, Mesh


@dataclass(frozen=True)
class Share:
    """This rank's features [lo, hi) of `size`."""

    size: int
    lo: int
    hi: int

    @property
    def count(self) -> int:
        return self.hi - self.lo


class LinearPart(NamedTuple):
    """A named linear layer of the checkpoint, or this rank's part of it, in a merged one."""

    name: str
    outputs: tuple[int, int]
    """This rank's range of the named layer's outputs."""
    inputs: tuple[int, int]
    first: int
    """Where its outputs begin in the merged layer."""


class OwnLinear(NamedTuple):
    """Named layers of `outputs` each, one after the other."""

    names: tuple[str, ...]
    outputs: int
    inputs: int
    is_paired: bool = False

    @property
    def stored(self) -> list[StoredTensor]:
        part = Part(0, 0, self.outputs)
        return [StoredTensor(f"{name}.weight", (self.outputs, self.inputs), part) for name in self.names]


@dataclass(frozen=True)
class Build:
    """The model, the source, dtypes and device of its weights, and this rank's place in it.

    Every weight goes to `device` as soon as it is read: host memory holds one tensor at a time.
    """

    config: ModelConfig
    weights: WeightSource
    precision: Precision
    mesh: Mesh = SOLO
    pp_layers: tuple[int, ...] = ()
    """Layers per pipeline stage; empty means one stage."""
    device: torch.device = CPU
    kernels: Kernels = TORCH
    quantize: WeightBits | None = None
    """How to quantize linear layers that are stored as floating-point numbers; None: not at all."""
    packed: PackedWeights | None = None
    """Packed weights shared with other processes; None: they are not shared."""
    lm_head: bool = True
    """Whether the model gives logits."""
    redundant_experts: int | None = None
    """Slots of each mixture beside one for each expert, for replicas; None: its experts never move."""
    adapt: Callable[[Linear, list[LinearPart]], Linear] = lambda linear, parts: linear
    """Wraps each linear layer, to apply LoRA adapters."""
    packed_as: str = ""
    """Beginning of the keys of packed weights, which tells those of another checkpoint from the model's."""

    @property
    def names(self) -> WeightNames:
        return self.config.weight_names

    @property
    def layer_numbers(self) -> range:
        """This rank's layers, as numbered in the model."""
        pp_layers = self.pp_layers or (self.config.num_layers,)
        first = sum(pp_layers[: self.mesh.place.pp_rank])
        return range(first, first + pp_layers[self.mesh.place.pp_rank])

    @property
    def for_own_rows(self) -> Build:
        """For the parts that a rank computes for its own rows only: with data-parallel attention whole, without exchange; else
        this."""
        place = self.mesh.place
        return replace(self, mesh=Mesh(place.alone)) if place.is_data_parallel else self

    def heads(self, attention: MultiHeadDescription) -> HeadRange:
        """This rank's heads."""
        return head_range(attention, self.mesh.place.tp_rank, self.mesh.place.tp_size)

    def inner(self, mlp: MlpDescription) -> Share:
        """This rank's features of the MLP's inner layer."""
        place = self.mesh.place
        return Share(mlp.inner_size, *even_range(mlp.inner_size, place.tp_size, place.tp_rank))

    def read(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        return self.weights.read(name, shape, self.precision.weight, part).to(self.device)

    def column_linear(
        self, names: list[str], shares: list[Share], in_features: int, *, bias: bool, is_paired: bool = False
    ) -> Linear:
        """This rank's output features of several named layers, one after the other, as one layer. Layers of one name lie in
        one tensor, one after the other.

        `is_paired`: the gate and up layers of a gated MLP.
        """
        sizes: dict[str, int] = {}
        parts: list[tuple[str, Part]] = []
        for name, share in zip(names, shares, strict=True):
            before = sizes.get(name, 0)
            parts.append((name, Part(0, before + share.lo, before + share.hi)))
            sizes[name] = before + share.size
        biases = [self.read(f"{name}.bias", sizes[name], part=part) for name, part in parts if bias]
        stacked = [StoredTensor(f"{name}.weight", (sizes[name], in_features), part) for name, part in parts]
        starts = [0, *accumulate(share.count for share in shares)]
        linear = self._linear(stacked, starts[-1], torch.cat(biases) if bias else None, is_paired)
        own = [
            LinearPart(name, (part.lo, part.hi), (0, in_features), first)
            for (name, part), first in zip(parts, starts, strict=False)
        ]
        return self.adapt(linear, own)

    def row_linear(self, name: str, share: Share, out_features: int, *, bias: bool) -> Linear:
        """A layer over this rank's input features; an all-reduce over the stage's ranks gives the whole layer's output."""
        part = Part(1, share.lo, share.hi)
        # Only one rank adds the bias, because the outputs are summed.
        has_bias = bias and self.mesh.place.tp_rank == 0
        own_bias = self.read(f"{name}.bias", out_features) if has_bias else None
        stored = StoredTensor(f"{name}.weight", (out_features, share.size), part)
        linear = self._linear([stored], out_features, own_bias)
        return self.adapt(linear, [LinearPart(name, (0, out_features), (share.lo, share.hi), 0)])

    def own_linears(self, layers: Sequence[OwnLinear], *, bias: bool) -> Sequence[Linear]:
        """Layers that lie whole on this rank: those of its experts. Adapters do not change them. Packed weights of all of them
        are one file, since each file takes a descriptor."""
        biases = [
            torch.cat([self.read(f"{name}.bias", layer.outputs) for name in layer.names]) if bias else None
            for layer in layers
        ]

        def make() -> list[Linear]:
            return [
                self._make_linear(layer.stored, layer.outputs * len(layer.names), own_bias, layer.is_paired)
                for layer, own_bias in zip(layers, biases, strict=True)
            ]

        return self._shared(f"linears {layers}", biases, make)

    def router_linear(self, name: str, outputs: int, *, bias: bool) -> Linear:
        """The layer that gives a mixture's logits, on every rank: float32, never quantized."""
        wide = replace(self, precision=FLOAT32)
        weight = wide.read(f"{name}.weight", outputs, self.config.hidden_size)
        own_bias = wide.read(f"{name}.bias", outputs) if bias else None
        return float_linear(weight, own_bias, FLOAT32, self.kernels)

    def _linear(
        self, stacked: list[StoredTensor], num_rows: int, bias: Tensor | None, is_paired: bool = False
    ) -> Linear:
        """The layer of these weights, stacked to `num_rows` rows."""
        key = f"linear {stacked} {is_paired}"
        return self._shared(key, [bias], lambda: [self._make_linear(stacked, num_rows, bias, is_paired)])[0]

    def _shared(
        self, key: str, biases: Sequence[Tensor | None], make: Callable[[], Sequence[Linear]]
    ) -> Sequence[Linear]:
        """The layers of `key`, which one file of packed weights holds, each with its bias ([out], which is not shared). `make` reads
        and packs their weights, and is called only if no process has done so before. If the native kernels do not have one of the
        layers, all are returned as `make` makes them."""
        if self.packed is None or not isinstance(self.kernels, NativeKernels):
            return make()
        made: Sequence[Linear] = ()

        def pack() -> PackedTensors | None:
            nonlocal made
            made = make()
            packed = [linear.packed for linear in made if isinstance(linear, NativeLinear)]
            return _tensors_of(packed) if len(packed) == len(made) else None

        found = self.packed.get(f"{self.packed_as}{key} {self.precision} {self.quantize}", pack)
        if found is None:
            return made
        native = self.kernels.native
        return [NativeLinear(native, _packed_of(found, index), bias) for index, bias in enumerate(biases)]

    def _make_linear(self, stacked: list[StoredTensor], num_rows: int, bias: Tensor | None, is_paired: bool) -> Linear:
        """The layer, in the checkpoint's format if that format can multiply."""
        target = LinearTarget(self.precision, self.kernels, is_paired)
        linear = self.weights.linear(stacked, bias, target)
        if linear is not None:
            return linear
        if self.quantize is not None:
            return quantize_linear(
                self.quantize, stacked, lambda stored: self._read_linear(replace(stored, part=None)), bias, target
            )
        if len(stacked) == 1:
            return float_linear(self._read_linear(stacked[0]), bias, self.precision, self.kernels)
        weight = torch.empty(num_rows, stacked[0].shape[1], dtype=self.precision.weight, device=self.device)
        at = 0
        for stored in stacked:
            assert stored.part is not None
            count = stored.part.hi - stored.part.lo
            weight[at : at + count] = self._read_linear(stored)
            at += count
        return float_linear(weight, bias, self.precision, self.kernels, is_paired=is_paired)

    def _read_linear(self, stored: StoredTensor) -> Tensor:
        """The weights of a linear layer, [out, in], or a part of them."""
        if not self.names.is_transposed:
            return self.read(stored.name, *stored.shape, part=stored.part)
        part = None if stored.part is None else replace(stored.part, dim=1 - stored.part.dim)
        return self.read(stored.name, *reversed(stored.shape), part=part).t().contiguous()

    def dense(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """A part of a matrix as floating-point numbers of the dtype of activations, whatever its format. It must not be
        written: where packed weights are shared, it is one copy in memory."""

        def read() -> Tensor:
            return self.read(name, *shape, part=part).to(self.precision.wide)

        if self.packed is None or self.device.type != "cpu":
            return read()
        key = f"{self.packed_as}dense {name} {part} {self.precision}"
        return self.packed.get(key, lambda: PackedTensors({"dense": read()})).tensors["dense"]

    def computed_linear(self, key: str, weight: Callable[[], Tensor]) -> Linear | None:
        """A layer of weights, [out, in], that are computed of others, where the native kernels pack it; else None. `key` tells
        it from others."""
        if not isinstance(self.kernels, NativeKernels):
            return None
        return self._shared(key, [None], lambda: [float_linear(weight(), None, self.precision, self.kernels)])[0]

    def lm_head_linear(self, name: str, tied: Tensor | None) -> Linear:
        """The LM head on this rank's rows of the matrix `name`, which `tied` holds if it is the embedding's; int8 suffices
        for its share of a step, and int4 would show."""

        def make() -> Linear:
            # Where packed weights are shared, `tied` is a view of a file: reading all of it would take memory.
            weight = self._read_vocabulary(name) if tied is None or self.packed is not None else tied
            if self.quantize is None:
                return float_linear(weight, None, self.precision, self.kernels)
            return make_int8_linear(quantize_int8(weight), None, LinearTarget(self.precision, self.kernels))

        return self._shared(f"LM head {name} {self._vocabulary_rows}", [None], lambda: [make()])[0]

    def kv_scales(self, attention: str, planes: Sequence[KVPlane]) -> tuple[float, ...]:
        """The scale of each plane that the checkpoint gives one layer's `attention` for an FP8 cache; 1 where it has none."""
        if self.config.quantization is None:
            return (1.0,) * len(planes)
        forms = "{0}.{1}_scale", "{0}.{1}_proj.{1}_scale", "{0}.kv_scale"
        return tuple(
            self.weights.read_scalar([form.format(attention, plane.name) for form in forms], 1.0) for plane in planes
        )

    def vocabulary(self, name: str) -> Tensor:
        """This rank's rows of a [vocab, hidden] matrix, padded with zeros to the number that every rank has. It must not be
        written: where possible it is a view of the checkpoint's file, and only the pages in use take memory."""
        own, rows = self._vocabulary_rows
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.device.type == "cpu" and own.hi - own.lo == rows:
            view = self.weights.view(name, shape, self.precision.weight, own)
            if view is not None:
                return view
        if self.packed is None:
            return self._read_vocabulary(name)
        key = f"{self.packed_as}vocabulary {name} {own} {rows} {self.precision.weight}"
        return self.packed.get(key, lambda: PackedTensors({"rows": self._read_vocabulary(name)})).tensors["rows"]

    @property
    def _vocabulary_rows(self) -> tuple[Part, int]:
        """This rank's rows of the vocabulary, and the number of rows of every rank."""
        size, place = self.config.vocab_size, self.mesh.place
        return Part(0, *vocab_range(size, place.tp_size, place.tp_rank)), vocab_rows(size, place.tp_size)

    def _read_vocabulary(self, name: str) -> Tensor:
        part, rows = self._vocabulary_rows
        own = self.read(name, self.config.vocab_size, self.config.hidden_size, part=part)
        if own.size(0) == rows:
            return own
        padded = own.new_zeros(rows, self.config.hidden_size)
        padded[: own.size(0)] = own
        return padded


def _tensors_of(packed: Sequence[PackedWeight]) -> PackedTensors:
    """The content of a file of packed weights."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for index, weight in enumerate(packed):
        own = {name: tensor for name in ("weight", "scale", "zero") if (tensor := getattr(weight, name)) is not None}
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
