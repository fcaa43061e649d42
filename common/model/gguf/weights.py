"""The weights of a GGUF file. Used by a rank's main thread while it loads.

Q8_0, Q4_0, Q4_1 and Q4_K matrices stay in groups of 32 inputs, experts in MXFP4 where native kernels multiply them; others
are dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import Q4_K, dequantize
from torch import Tensor

from common.base.device import CPU
from common.base.errors import ConfigError
from common.kernels.native.kernels import NativeKernels
from common.kernels.native.linear import NativeLinear, pack_fp4
from common.model.description import AttentionDescription, MultiHeadDescription
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.groupwise import GroupWeight, make_group_linear, stack_groups
from common.model.formats.mxfp4 import powers_of_two
from common.model.gguf.config import gguf_architecture
from common.model.gguf.file import GgufFile, GgufTensor
from common.model.tensor_files import Part
from common.model.weights import WeightSource

_Blocks = npt.NDArray[np.uint8]
_MXFP4, _MXFP4_BYTES = GGMLQuantizationType.MXFP4, 17
_CHUNK_WEIGHTS = 2**22
"""Weights that are dequantized at a time."""


def _from_q8_0(blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """A float16 scale, then 32 signed codes."""
    codes = torch.from_numpy(blocks[..., 2:].copy()).bitwise_xor(128)
    scale = _half(blocks, 0)
    return codes, scale, torch.full_like(scale, 128)


def _from_q4_0(blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """A float16 scale, then 16 bytes: their low halves, then their high halves."""
    scale = _half(blocks, 0)
    return _halves(blocks[..., 2:]), scale, torch.full_like(scale, 8)


def _from_q4_1(blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """A float16 scale and minimum, then as in Q4_0."""
    return _with_minimum(_halves(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _from_q4_k(blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Eight groups: factors of their scales and minima, these in 6 bits, then 32 bytes for each two groups."""
    rows = blocks.shape[:-1]
    scales, minima = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
    scale = _half(blocks, 0)[..., None] * torch.from_numpy(scales.astype(np.float32)).view(*rows, 8)
    minimum = _half(blocks, 2)[..., None] * torch.from_numpy(minima.astype(np.float32)).view(*rows, 8)
    codes = _halves(blocks[..., 16:].reshape(*rows, 4, 32)).view(*rows, 8, 32)
    return _with_minimum(codes, scale, -minimum)


def _from_mxfp4(blocks: _Blocks) -> tuple[Tensor, Tensor]:
    """A power of two in a byte, then as in Q4_0. Returns codes in e2m1 [rows, in], scales [rows, in / 32]."""
    return _halves(blocks[..., 1:]).flatten(1), powers_of_two(torch.from_numpy(blocks[..., 0].copy()))


def _with_minimum(codes: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """scale * code + minimum as scale * (code - zero), also where the scale is 0."""
    flat = scale == 0
    return (
        codes.masked_fill(flat[..., None], 0),
        torch.where(flat, minimum, scale),
        torch.where(flat, -1.0, -minimum / scale),
    )


def _half(blocks: _Blocks, at: int) -> Tensor:
    return torch.from_numpy(blocks[..., at : at + 2].copy().view("<f2")[..., 0].astype(np.float32))


def _halves(packed: _Blocks) -> Tensor:
    codes = torch.from_numpy(packed.copy())
    return torch.cat([codes & 15, codes >> 4], -1)


_GROUPS: dict[GGMLQuantizationType, tuple[int, int, int, Callable[[_Blocks], tuple[Tensor, Tensor, Tensor]]]] = {
    GGMLQuantizationType.Q8_0: (8, 32, 34, _from_q8_0),
    GGMLQuantizationType.Q4_0: (4, 32, 18, _from_q4_0),
    GGMLQuantizationType.Q4_1: (4, 32, 20, _from_q4_1),
    GGMLQuantizationType.Q4_K: (4, 32, 144, _from_q4_k),
}
"""Bits, inputs in a group, bytes of a block, and what reads blocks [rows, blocks, bytes]: codes [..., group], scale and
zero [...]."""


def _whole_shape(stored: StoredTensor) -> tuple[int, ...]:
    """The shape of the tensor that holds the matrix. Gate and up of experts are never in one tensor."""
    return stored.shape if stored.place is None else (stored.place.experts, *stored.shape)


class GgufWeights(WeightSource):
    """The tensors of one file. It holds no scales of KV, and one with an LM head does not say that it is tied."""

    def __init__(self, file: GgufFile, attention: AttentionDescription, device: torch.device = CPU) -> None:
        self._file = file
        self._data = np.memmap(file.path, np.uint8, "c")
        self._device = device
        architecture = gguf_architecture(file)
        self._norm_offset = architecture.norm_offset
        self._heads: dict[str, int] = {}
        if architecture.pairs_rows and isinstance(attention, MultiHeadDescription):
            self._heads = {"attn_q": attention.num_q_heads, "attn_k": attention.num_kv_heads}

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        tensor = self._find(name, shape)
        rows = self._bytes(tensor)
        if len(shape) == 3 and part is not None:  # stacked experts
            rows = rows[part.lo * shape[1] : part.hi * shape[1]]
            shape, part = (part.hi - part.lo, *shape[1:]), None
        out = torch.empty(len(rows), shape[-1], dtype=dtype)
        step = max(1, _CHUNK_WEIGHTS // shape[-1])
        for at in range(0, len(rows), step):
            try:
                chunk = torch.from_numpy(dequantize(rows[at : at + step], tensor.kind))
            except NotImplementedError as error:
                raise ConfigError(
                    f"{self._file.path}: tensor {name} is stored as {tensor.kind.name}, which cannot be read"
                ) from error
            out[at : at + step] = chunk - self._norm_offset if name.endswith("norm.weight") else chunk
        return self._own(tensor, out.view(shape), part).contiguous().to(self._device)

    def linear(self, stacked: Sequence[StoredTensor], bias: Tensor | None, target: LinearTarget) -> Linear | None:
        """None also if the matrices are stored in different ways."""
        tensors = [self._find(stored.name, _whole_shape(stored)) for stored in stacked]
        kind = tensors[0].kind
        if any(tensor.kind != kind for tensor in tensors):
            return None
        if kind == _MXFP4 and stacked[0].place is not None and isinstance(target.kernels, NativeKernels):
            blocks = np.concatenate([self._rows(*each) for each in zip(tensors, stacked, strict=True)])
            codes, scales = _from_mxfp4(blocks.reshape(len(blocks), -1, _MXFP4_BYTES))
            packed = pack_fp4(codes, scales, is_paired=target.is_paired)
            return NativeLinear(target.kernels.native, packed, bias)
        if kind not in _GROUPS:
            return None
        parts = [self._groups(tensor, stored).cut(stored) for tensor, stored in zip(tensors, stacked, strict=True)]
        weight = stack_groups(parts)
        return None if weight is None else make_group_linear(weight, bias, target)

    def _groups(self, tensor: GgufTensor, stored: StoredTensor) -> GroupWeight:
        bits, group, block_bytes, read = _GROUPS[tensor.kind]
        out, columns = stored.shape
        codes, scale, zero = read(self._rows(tensor, stored).reshape(out, -1, block_bytes))
        own = (
            self._own(tensor, each.view(out, width), None).to(self._device)
            for each, width in ((codes, columns), (scale, columns // group), (zero, columns // group))
        )
        return GroupWeight(next(own), next(own), next(own), bits)

    def _rows(self, tensor: GgufTensor, stored: StoredTensor) -> _Blocks:
        """The bytes of a matrix, or of one expert's in a tensor of all experts."""
        first = 0 if stored.place is None else stored.place.expert * stored.shape[0]
        return self._bytes(tensor)[first : first + stored.shape[0]]

    def _bytes(self, tensor: GgufTensor) -> _Blocks:
        """[rows, bytes of a row]; a vector is one row."""
        rows = math.prod(tensor.shape[:-1])
        return self._data[tensor.lo : tensor.hi].reshape(rows, -1)

    def _own(self, tensor: GgufTensor, whole: Tensor, part: Part | None) -> Tensor:
        """The part of a tensor whose rows are as in the file, in the order in which Hugging Face's rope wants rows.

        The files of some architectures have each head's rows in pairs for the other kind of rope. Source:
        `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py.
        """
        heads = self._heads.get(tensor.name.split(".")[-2]) if "." in tensor.name else None
        if heads is not None:
            rows = torch.arange(whole.size(0)).view(heads, -1, 2).transpose(1, 2).flatten()
            whole = whole.index_select(0, rows)
        return whole if part is None else whole.narrow(part.dim, part.lo, part.hi - part.lo)

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self._file.path} holds no tensor {name}")
        if tensor.shape != shape:
            raise ConfigError(
                f"{self._file.path}: tensor {name} has shape {list(tensor.shape)}, its metadata implies {list(shape)}"
            )
        return tensor
