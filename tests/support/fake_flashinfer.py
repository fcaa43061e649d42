"""The functions of flashinfer that the project uses, with the same signatures, computed by plain PyTorch on a CPU.

It checks the preconditions of the real kernels (shapes, dtypes, contiguous last axes, 32-bit indices, pages that are
planned before they are read) strictly enough that every call it accepts is accepted by both 0.6 and 0.7.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__version__ = "0.0.fake"

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The real kernels take 16 bits only; float32 makes comparisons sharp."""


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    _same_dtype(input, weight)
    assert input.dim() in (2, 3)
    assert input.stride(-1) == 1
    assert weight.shape == input.shape[-1:]
    wide = input.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    out = torch.empty_like(input) if out is None else out
    return out.copy_(normed)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    _same_dtype(input, residual, weight)
    assert input.dim() == 2
    assert input.shape == residual.shape
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float())


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    _same_dtype(input, weight)
    assert input.dim() == 2
    out = torch.empty_like(input) if out is None else out
    return out.copy_(rmsnorm(input.float(), weight.float() + 1, eps))


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    _same_dtype(input, residual, weight)
    total = input.float() + residual.float()
    fused_add_rmsnorm(total, torch.zeros_like(total), weight.float() + 1, eps)
    residual.add_(input)
    input.copy_(total)


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    inner = input.size(-1) // 2
    if inner * input.element_size() % 16:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    assert input.is_contiguous()
    wide = input.float()
    result = (torch.nn.functional.silu(wide[..., :inner]) * wide[..., inner:]).to(input.dtype)
    return result if out is None else out.copy_(result)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    assert is_neox
    assert positions.dtype in (torch.int32, torch.int64)
    assert positions.is_contiguous()
    assert head_size in (64, 128, 256, 512)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
    for part in (query.view(query.shape[0], -1, head_size), key.view(key.shape[0], -1, head_size)):
        assert part.stride(-1) == 1
        low, high = part.float().chunk(2, -1)
        part.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), -1))


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "HND"
    assert isinstance(paged_kv_cache, tuple)
    _int32(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert kv_indptr.numel() == kv_last_page_len.numel() + 1
    assert batch_indices.numel() == positions.numel() == append_key.size(0) == append_value.size(0)
    for rows, pages in zip((append_key, append_value), paged_kv_cache, strict=True):
        # The real kernel copies bytes: it does not convert.
        _same_dtype(rows, pages)
        assert rows.stride(-1) == 1
        num_heads, page_size, head_dim = pages.shape[1:]
        assert rows.shape[1:] == (num_heads, head_dim)
        assert head_dim in (64, 128, 256, 512)
        where = kv_indptr[batch_indices] * page_size + positions
        _words(pages)[kv_indices[where // page_size].long(), :, where.long() % page_size] = _words(rows)


class _PagedWrapper:
    """Common part of both wrappers: attends to the pages of the last `plan`, reading the buffers at `run`."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8
        self.is_cuda_graph_enabled = use_cuda_graph
        self._window_left, self._soft_cap = -1, None
        self._planned = False
        self.num_plans = 0

    def _keep(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, buffers: tuple[Tensor, Tensor, Tensor] | None
    ) -> None:
        _int32(indptr, indices, last_page_len)
        assert indptr[0] == 0
        assert indptr[-1] == indices.numel()
        assert ((last_page_len >= 1) & (indptr.diff() >= 1)).all()
        if buffers is None:
            self._indptr, self._indices, self._last = indptr.clone(), indices.clone(), last_page_len.clone()
        else:
            self._indptr, self._indices, self._last = buffers
            if last_page_len.numel() != self._last.numel():
                raise ValueError("The batch size should be fixed in cudagraph mode")
            if indices.numel() > self._indices.numel():
                raise ValueError("The size of indices should be less than or equal to the allocated buffer")
            self._indptr.copy_(indptr)
            self._indices[: indices.numel()].copy_(indices)
            self._last.copy_(last_page_len)
        self._planned = True
        self.num_plans += 1

    def _attend(
        self, q: Tensor, qo_indptr: list[int], cache: tuple[Tensor, Tensor], k_scale: float, v_scale: float, out: Tensor
    ) -> Tensor:
        assert self._planned
        assert q.stride(-1) == 1
        assert out.shape == q.shape
        assert q.dtype == self._q_dtype == out.dtype
        assert cache[0].dtype == self._kv_dtype
        assert cache[0].shape[1:] == (self._kv_heads, self._page_size, self._head_dim)
        assert qo_indptr[-1] == q.size(0)
        group = q.size(1) // self._kv_heads
        for i, last in enumerate(self._last.tolist()):
            pages = self._indices[self._indptr[i] : self._indptr[i + 1]].long()
            length = (pages.numel() - 1) * self._page_size + last
            taken = (_words(side)[pages].view(side.dtype) for side in cache)
            k, v = (side.float().transpose(0, 1).flatten(1, 2)[:, :length] for side in taken)
            k, v = (side.repeat_interleave(group, 0) for side in (k, v))
            rows = q[qo_indptr[i] : qo_indptr[i + 1]].float().transpose(0, 1)
            scores = rows @ k.transpose(1, 2) * (k_scale * self._sm_scale)
            if self._soft_cap is not None:
                scores = self._soft_cap * (scores / self._soft_cap).tanh()
            own = torch.arange(length - rows.size(1), length)[:, None]
            hidden = torch.arange(length) > own
            if self._window_left >= 0:
                hidden |= torch.arange(length) < own - self._window_left
            probs = scores.masked_fill_(hidden, -math.inf).softmax(-1)
            out[qo_indptr[i] : qo_indptr[i + 1]] = (probs @ v * v_scale).transpose(0, 1)
        return out

    def _shape(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        q_dtype: object,
        kv: object,
        scale: float | None,
    ) -> None:
        assert q_heads % kv_heads == 0
        assert head_dim in (64, 128, 256, 512)
        self._kv_heads, self._head_dim, self._page_size = kv_heads, head_dim, page_size
        self._q_dtype, self._kv_dtype = q_dtype, kv
        self._sm_scale = 1 / math.sqrt(head_dim) if scale is None else scale
        assert q_dtype in _FLOATS


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert not use_cuda_graph
        assert backend in ("fa2", "fa3")
        self._backend = backend

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        assert causal
        _int32(qo_indptr)
        assert qo_indptr.numel() == paged_kv_last_page_len.numel() + 1
        assert (qo_indptr.diff() >= 1).all()
        self._qo_indptr = qo_indptr.tolist()
        self._shape(num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type, sm_scale)
        self._window_left, self._soft_cap = window_left, logits_soft_cap
        # The FA3 kernels read FP8 pages only for FP8 queries.
        assert not (self._backend == "fa3" and kv_data_type == torch.float8_e4m3fn)
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, None)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q) if out is None else out
        return self._attend(q, self._qo_indptr, paged_kv_cache, _scale(k_scale), _scale(v_scale), out)


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert backend == "fa2"
        self._use_tensor_cores = use_tensor_cores
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            assert self._buffers[0].numel() == self._buffers[2].numel() + 1

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        # Groups that the kernel without tensor cores is compiled for.
        assert self._use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        self._shape(num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type, sm_scale)
        self._window_left, self._soft_cap = window_left, logits_soft_cap
        self._keep(indptr, indices, last_page_len, self._buffers)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q) if out is None else out
        return self._attend(q, list(range(q.size(0) + 1)), paged_kv_cache, _scale(k_scale), _scale(v_scale), out)


class BatchMLAPagedAttentionWrapper:
    """Latents and rotated keys of one head, which are key; the latents are value too."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self._buffers: tuple[Any, ...] = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(isinstance(buffer, Tensor) == use_cuda_graph for buffer in self._buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        planned = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        _int32(*planned)
        assert causal
        assert qo_indptr.numel() == kv_indptr.numel() == kv_len_arr.numel() + 1
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert q_data_type == kv_data_type in _FLOATS
        for i, (buffer, values) in enumerate(zip(self._buffers, planned, strict=True)):
            if buffer is not None:
                assert buffer.numel() == values.numel() or (i == 2 and buffer.numel() > values.numel())
                buffer[: values.numel()].copy_(values)
        self._read = planned if self._buffers[0] is None else self._buffers
        self._settings = (num_heads, page_size, sm_scale, q_data_type)

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        num_heads, page_size, sm_scale, dtype = self._settings
        _same_dtype(q_nope, q_pe, ckv_cache, kpe_cache, torch.empty(0, dtype=dtype))
        assert (q_nope.shape[1:], ckv_cache.shape[1:]) == ((num_heads, 512), (page_size, 512))
        assert all(each.stride(-1) == 1 for each in (q_nope, q_pe, ckv_cache, kpe_cache))
        out = torch.empty_like(q_nope)
        rows, pages, indices, lens = self._read
        for i, length in enumerate(lens.tolist()):
            own = indices[pages[i] : pages[i + 1]].long()
            latents, keys = (side[own].flatten(0, 1)[:length].float() for side in (ckv_cache, kpe_cache))
            lo, hi = rows[i : i + 2].tolist()
            q, k = torch.cat((q_nope[lo:hi], q_pe[lo:hi]), -1).float(), torch.cat((latents, keys), 1)
            hidden = torch.arange(length) > torch.arange(length - (hi - lo), length)[:, None]
            scores = torch.einsum("rhd,td->hrt", q, k) * sm_scale
            out[lo:hi] = (scores.masked_fill_(hidden, -math.inf).softmax(-1) @ latents).transpose(0, 1)
        return out


def _scale(scale: float | None) -> float:
    return 1.0 if scale is None else scale


def _words(x: Tensor) -> Tensor:
    """FP8 as bytes, which can be indexed."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _same_dtype(*tensors: Tensor) -> None:
    assert len({tensor.dtype for tensor in tensors}) == 1, [tensor.dtype for tensor in tensors]


def _int32(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
