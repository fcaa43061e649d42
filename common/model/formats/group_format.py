"""Reads 4 and 8 bit weights in groups, packed in int32 words, as AWQ, GPTQ and compressed-tensors store them.

Used by a rank's main thread while it loads. A matrix is read and unpacked whole, then cut: words span outputs or inputs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.groupwise import GroupWeight, make_group_linear, stack_groups
from common.model.formats.quantization import (
    AwqQuantization,
    GptqQuantization,
    GroupQuantization,
    PackedQuantization,
)
from common.model.tensor_files import TensorFiles

log = logging.getLogger(__name__)

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word hold each of eight consecutive outputs. Source: AutoAWQ, awq/utils/packing_utils.py."""


def unpack_words(words: Tensor, bits: int, places: Sequence[int] | None = None) -> Tensor:
    """Unpack the numbers in int32 words: [rows, n] to [rows, n * 32 / bits] uint8; by default the lowest bits come first."""
    order = range(32 // bits) if places is None else places
    shifts = torch.tensor([bits * place for place in order], dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts).bitwise_and_(2**bits - 1).to(torch.uint8).flatten(1)


@dataclass(frozen=True)
class _Module:
    """One linear layer of a checkpoint, whose matrix is [out, columns]."""

    name: str
    stored_name: str
    """Name of the tensor of its codes."""
    out: int
    columns: int
    tensors: TensorFiles
    device: torch.device

    def words(self, suffix: str, *shape: int) -> Tensor:
        """A tensor of int32 words. Raises: ConfigError."""
        name = f"{self.name}.{suffix}"
        words = self.tensors.read(name, shape)
        if words.dtype != torch.int32:
            raise self.error(f"tensor {name} is {words.dtype}, not torch.int32")
        return words.to(self.device)

    def numbers(self, suffix: str, *shape: int) -> Tensor:
        """A tensor as float32. Raises: ConfigError."""
        return self.tensors.read(f"{self.name}.{suffix}", shape).to(self.device, torch.float32)

    def groups(self, group: int | None, bits: int) -> int:
        """The number of groups of inputs; None: one. Raises: ConfigError if words or groups do not fit the matrix."""
        per_word = 32 // bits
        if self.columns % (group or per_word) or self.columns % per_word or self.out % per_word:
            raise self.error(
                f"{self.name} has {self.out} outputs and {self.columns} inputs, which do not divide into groups of "
                f"{group or self.columns} and words of {per_word}"
            )
        return self.columns // (group or self.columns)

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.tensors.file_of(self.stored_name)}: {message}")


def _read_awq(module: _Module, settings: AwqQuantization) -> GroupWeight:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    out, columns = module.out, module.columns
    groups = module.groups(settings.group, 4)
    codes = unpack_words(module.words("qweight", columns, out // 8), 4, _AWQ_PLACES)
    zeros = unpack_words(module.words("qzeros", groups, out // 8), 4, _AWQ_PLACES)
    scales = module.numbers("scales", groups, out)
    return GroupWeight(codes.t().contiguous(), scales.t().contiguous(), zeros.t().float().contiguous(), 4)


def _read_gptq(module: _Module, settings: GptqQuantization) -> GroupWeight:
    """qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out].

    The offset of zeros was subtracted from whole words, in which a zero of 0 borrows from the next one. Source: GPTQModel,
    gptqmodel/utils/model.py.
    """
    out, columns, bits = module.out, module.columns, settings.bits
    groups, per_word = module.groups(settings.group, bits), 32 // bits
    codes = unpack_words(module.words("qweight", columns // per_word, out).t(), bits)
    offset = sum(settings.zero_offset << bits * place for place in range(per_word))
    zeros = unpack_words(module.words("qzeros", groups, out // per_word) + offset, bits).float()
    return GroupWeight(codes, module.numbers("scales", groups, out).t().contiguous(), zeros.t().contiguous(), bits)


def _read_packed(module: _Module, settings: PackedQuantization) -> GroupWeight:
    """weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point [out * bits / 32, groups]."""
    out, columns, bits = module.out, module.columns, settings.bits
    groups, per_word = module.groups(settings.group, bits), 32 // bits
    codes = unpack_words(module.words("weight_packed", out, columns // per_word), bits)
    scale = module.numbers("weight_scale", out, groups)
    if settings.is_symmetric:
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        words = module.words("weight_zero_point", out // per_word, groups)
        zero = unpack_words(words.t(), bits).t().float().contiguous()
    return GroupWeight(codes, scale, zero, bits)


_READERS: dict[type[GroupQuantization], Callable[[_Module, Any], GroupWeight]] = {
    AwqQuantization: _read_awq,
    GptqQuantization: _read_gptq,
    PackedQuantization: _read_packed,
}


@dataclass(frozen=True)
class _Matrix:
    """A whole matrix. group_of: [in] int64, the group of each input, if inputs of one group do not lie side by side."""

    weight: GroupWeight
    group_of: Tensor | None

    @property
    def order(self) -> Tensor | None:
        """[in] int64: the inputs group by group; None if groups differ in size."""
        assert self.group_of is not None
        sizes = self.group_of.bincount(minlength=self.weight.scale.size(1))
        return self.group_of.argsort(stable=True) if bool((sizes == self.weight.group).all()) else None

    def dequantized(self) -> Tensor:
        """[out, in] float32."""
        if self.group_of is None:
            return self.weight.dequantized()
        scale, zero = (each.index_select(1, self.group_of) for each in (self.weight.scale, self.weight.zero))
        return self.weight.codes.float().sub_(zero).mul_(scale)


class GroupFormat:
    """`LinearFormat` of a checkpoint whose `quantization_config` is a `GroupQuantization`."""

    def __init__(self, tensors: TensorFiles, device: torch.device, quantization: GroupQuantization) -> None:
        self._tensors = tensors
        self._device = device
        self._settings = quantization
        self._read_weight = _READERS[type(quantization)]

    def holds(self, name: str) -> bool:
        return name.endswith(".weight") and f"{name.removesuffix('weight')}{self._settings.codes_name}" in self._tensors

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        wide, part = self._matrix(stored).dequantized(), stored.part
        own = wide if part is None else wide.narrow(part.dim, part.lo, part.hi - part.lo)
        return own.to(dtype).contiguous()

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear | None:
        """None where inputs of one group do not lie side by side (GPTQ's desc_act), unless all matrices and all inputs
        of the layer have the same order."""
        matrices = [self._matrix(stored) for stored in stacked]
        if all(matrix.group_of is None for matrix in matrices):
            weight = stack_groups([m.weight.cut(stored) for m, stored in zip(matrices, stacked, strict=True)])
            return None if weight is None else make_group_linear(weight, bias, target)
        order = self._common_order(matrices, stacked)
        if order is None:
            _log_unordered()
            return None
        sorted_ = [
            GroupWeight(m.weight.codes.index_select(1, order), m.weight.scale, m.weight.zero, m.weight.bits).cut(stored)
            for m, stored in zip(matrices, stacked, strict=True)
        ]
        weight = stack_groups(sorted_)
        return None if weight is None else ReorderedLinear(order, make_group_linear(weight, bias, target))

    def _common_order(self, matrices: Sequence[_Matrix], stacked: Sequence[StoredTensor]) -> Tensor | None:
        if any(matrix.group_of is None for matrix in matrices) or any(stored.splits_inputs for stored in stacked):
            return None
        orders = [matrix.order for matrix in matrices]
        first = orders[0]
        if first is None or any(order is None or not torch.equal(order, first) for order in orders):
            return None
        return first

    def _matrix(self, stored: StoredTensor) -> _Matrix:
        prefix = stored.name.removesuffix(".weight")
        if len(stored.shape) != 2:
            raise ConfigError(f"{prefix}.{self._settings.codes_name} belongs to a tensor of shape {list(stored.shape)}")
        module = _Module(prefix, f"{prefix}.{self._settings.codes_name}", *stored.shape, self._tensors, self._device)
        weight = self._read_weight(module, self._settings)
        if not bool(weight.scale.isfinite().all()):
            raise module.error(f"the scales of {prefix} are not finite")
        return _Matrix(weight, self._group_of(module, weight))

    def _group_of(self, module: _Module, weight: GroupWeight) -> Tensor | None:
        name = f"{module.name}.{self._settings.order_name}"
        if name not in self._tensors:
            return None
        groups = self._tensors.read(name, (module.columns,)).to(self._device, torch.int64)
        if int(groups.max()) <= 0:  # an unfilled list means the usual order, as in other servers
            return None
        if int(groups.min()) < 0 or int(groups.max()) >= weight.scale.size(1):
            raise module.error(f"tensor {name} names groups beyond the {weight.scale.size(1)} that there are")
        usual = torch.arange(module.columns, device=groups.device) // weight.group
        return None if torch.equal(groups, usual) else groups


class ReorderedLinear:
    """A layer whose inputs are taken in another order."""

    def __init__(self, order: Tensor, linear: Linear) -> None:
        """order: [in] int64."""
        self._order = order
        self._linear = linear

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._linear.forward(x.index_select(1, self._order), dtype)


@functools.cache
def _log_unordered() -> None:
    log.info(
        "weights whose groups are scattered over inputs (desc_act) are dequantized where ranks split or layers merge them"
    )
