"""Paged attention by flashinfer, on CUDA. Runs on a rank's engine thread, on its current stream.

Decode rows and the rows of prompt chunks use separate kernels. Decode uses the tensor-core kernels too: they accept any
number of query heads per KV head, and the heads of a group share each read of K and V. On Hopper, prompts use FA3
unless the cache is FP8.

flashinfer's `plan` works on the CPU and copies its result from its own pinned memory, which the next plan overwrites:
each plan first waits until the copies of the previous one are done. They are queued before that step's kernels, so
preparing one step ahead of the running one does not wait.
"""

from __future__ import annotations

from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.block_lists import BlockLists, block_lists, host_int32, longest_table
from common.kernels.flashinfer_kernels import DTYPES, HEAD_DIMS
from common.kernels.float8 import E4M3, narrow
from common.kv.rank_layout import blocks_for
from common.kv.storage import GroupStorage

_LAYOUT = "HND"
_SPLIT_BYTES = 256 * 2**20
"""Workspace for partial results of long sequences whose KV is split over several thread blocks; larger if
`graph_split_bytes` or `eager_split_bytes` is."""
_DECODE_TILES = (16, 128)
"""Query rows of one KV head per thread block in a decode step: for up to 16 query heads per group, and for more."""
_PLAN_BYTES = 8 * 2**20
"""Workspace for the plan of one batch on the device."""


def unsupported_reason(shape: AttentionShape, cache_dtype: torch.dtype) -> str:
    """Why flashinfer has no kernels for this model; empty if it has some."""
    if shape.dtype not in DTYPES:
        return f"flashinfer attends in 16 bits, the model computes in {shape.dtype}"
    if shape.head_dim not in HEAD_DIMS:
        return f"flashinfer has kernels for heads of {HEAD_DIMS}, the model's have {shape.head_dim}"
    if cache_dtype not in (shape.dtype, E4M3):
        return f"flashinfer reads no {cache_dtype} cache for {shape.dtype} queries"
    if shape.sinks:
        return "the model has attention sinks, which flashinfer's usual kernels lack"
    return ""


def prefill_backend(device: torch.device, cache_dtype: torch.dtype) -> str:
    """flashinfer's backend for prompts: FA3 is written for Hopper, and reads an FP8 cache only for FP8 queries."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return "fa3" if hopper and cache_dtype != E4M3 else "fa2"


class _Cache:
    """The KV blocks of all layers, and appending to them."""

    def __init__(self, kv: GroupStorage, flashinfer: ModuleType) -> None:
        self.device, self.dtype = kv.device, kv.dtype
        self.scales = kv.scales
        self.layers = list(zip(kv.planes["k"], kv.planes["v"], strict=True))
        self._append = flashinfer.append_paged_kv_cache
        # All blocks are presented as one sequence, in which the position of a token is its slot in the cache.
        self._indices = torch.arange(kv.num_blocks, dtype=torch.int32, device=kv.device)
        self._indptr = torch.tensor([0, kv.num_blocks], dtype=torch.int32, device=kv.device)
        self._last_page_len = torch.tensor([kv.block_size], dtype=torch.int32, device=kv.device)

    def append(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, sequence: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]; slots: [T] int32; sequence: [T] int32 zeros."""
        k_scale, v_scale = self.scales[layer]
        self._append(
            narrow(k, self.dtype, k_scale),
            narrow(v, self.dtype, v_scale),
            sequence,
            slots,
            self.layers[layer],
            self._indices,
            self._indptr,
            self._last_page_len,
            _LAYOUT,
        )


class Fence:
    """Makes the next plan wait for the copies of the previous one."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def mark(self) -> None:
        if self._event is not None:
            self._event.record()


class FlashInferAttention:
    """`AttentionBackend` for one rank's `GroupStorage` of K and V.

    Its `for_graph` backends share its device memory, so all their steps must run on one stream.
    """

    def __init__(self, kv: GroupStorage, shape: AttentionShape, flashinfer: ModuleType) -> None:
        """`unsupported_reason` must be empty for `shape` and the dtype of `kv`."""
        self._flashinfer = flashinfer
        self._shape = shape
        self._cache = _Cache(kv, flashinfer)
        device = self._cache.device
        self._pinned = device.type == "cuda"
        self._fence = Fence(device)
        split = max(_SPLIT_BYTES, eager_split_bytes(shape, _num_processors(device)))
        self._split = torch.zeros(split, dtype=torch.uint8, device=device)
        self._plan = torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=device)
        backend = prefill_backend(device, self._cache.dtype)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._split, _LAYOUT, backend=backend)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._split, _LAYOUT, use_tensor_cores=True, backend="fa2"
        )
        self._max_blocks = longest_table(shape, kv.num_blocks)
        self._graph_blocks = torch.empty(0, dtype=torch.int32, device=device)
        self._num_decode_rows = 0
        self._slots = self._sequence = torch.empty(0, dtype=torch.int32, device=device)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._slots = metadata.slot_mapping.to(self._cache.device, torch.int32)
        self._sequence = torch.zeros_like(self._slots)
        self._num_decode_rows = n = metadata.num_decode_rows
        self._fence.wait()
        if n:
            lists = self._lists(metadata, slice(0, n))
            indices = lists.indices.to(self._cache.device, non_blocking=True)
            plan_decode(self._decode, self._shape, self._cache.dtype, lists.indptr, indices, lists.last_page_len)
        if n < len(metadata.query_lens):
            self._plan_prefill(metadata, n)
        self._fence.mark()

    def _plan_prefill(self, metadata: AttentionMetadata, first: int) -> None:
        """Plan the sequences from `first` on. Some may have a single row."""
        shape = self._shape
        lists = self._lists(metadata, slice(first, None))
        self._prefill.plan(
            host_int32([0, *accumulate(metadata.query_lens[first:])], pinned=self._pinned),
            lists.indptr,
            lists.indices.to(self._cache.device, non_blocking=True),
            lists.last_page_len,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,
            **_scores(shape),
            q_data_type=shape.dtype,
            kv_data_type=self._cache.dtype,
            non_blocking=True,
        )

    def _lists(self, metadata: AttentionMetadata, part: slice) -> BlockLists:
        """The blocks of some of the batch's entries."""
        lens = metadata.query_lens[part], metadata.context_lens[part]
        return block_lists(self._shape, *lens, metadata.block_tables[part], pinned=self._pinned)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, n = self._cache, self._num_decode_rows
        cache.append(layer, k, v, self._slots, self._sequence)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k_scale, v_scale = cache.scales[layer]
        for wrapper, rows in ((self._decode, slice(0, n)), (self._prefill, slice(n, q.size(0)))):
            if rows.start < rows.stop:
                wrapper.run(q[rows], cache.layers[layer], k_scale=k_scale, v_scale=v_scale, out=out[rows])
        return out

    def for_graph(self, rows: int) -> FlashInferDecode:
        """Ask for the largest first: the smaller ones share its list of KV blocks."""
        needed = rows * self._max_blocks
        if self._graph_blocks.numel() < needed:
            self._graph_blocks = torch.zeros(needed, dtype=torch.int32, device=self._cache.device)
        split_bytes = graph_split_bytes(self._shape, rows)
        if self._split.numel() < split_bytes:
            self._split = torch.zeros(split_bytes, dtype=torch.uint8, device=self._cache.device)
        return FlashInferDecode(
            self._flashinfer, self._shape, self._cache, self._graph_blocks[:needed], self._split, self._plan, rows
        )


class FlashInferDecode:
    """`AttentionBackend` for steps of exactly `rows` decode rows, in static memory."""

    def __init__(
        self,
        flashinfer: ModuleType,
        shape: AttentionShape,
        cache: _Cache,
        blocks: Tensor,
        split: Tensor,
        plan: Tensor,
        rows: int,
    ) -> None:
        """`blocks` (int32), `split` and `plan` (bytes) may be shared with backends whose steps run at other times."""
        self._shape = shape
        self._cache = cache
        self._pinned = cache.device.type == "cuda"
        self._fence = Fence(cache.device)
        self._blocks = blocks
        self._slots = torch.zeros(rows, dtype=torch.int32, device=cache.device)
        self._sequence = torch.zeros_like(self._slots)
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            split,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32, device=cache.device),
            paged_kv_indices_buffer=blocks,
            paged_kv_last_page_len_buffer=torch.zeros(rows, dtype=torch.int32, device=cache.device),
            backend="fa2",
        )
        # One shared buffer for the plan instead of 8 MB for each size.
        self._wrapper.reset_workspace_buffer(split, plan)

    def plan(self, metadata: AttentionMetadata) -> None:
        lens = metadata.query_lens, metadata.context_lens
        lists = block_lists(self._shape, *lens, metadata.block_tables, pinned=self._pinned)
        count = lists.indices.numel()
        if count > self._blocks.numel():
            raise ValueError(
                f"the batch has {count} KV blocks, more than the {self._blocks.numel()} of the longest contexts"
            )
        self._fence.wait()
        self._slots.copy_(metadata.slot_mapping, non_blocking=True)
        self._blocks[:count].copy_(lists.indices, non_blocking=True)
        plan_decode(
            self._wrapper, self._shape, self._cache.dtype, lists.indptr, self._blocks[:count], lists.last_page_len
        )
        self._fence.mark()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self._cache
        cache.append(layer, k, v, self._slots, self._sequence)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        k_scale, v_scale = cache.scales[layer]
        return self._wrapper.run(q, cache.layers[layer], k_scale=k_scale, v_scale=v_scale, out=out)

    def for_graph(self, rows: int) -> FlashInferDecode:
        raise NotImplementedError("a backend for CUDA graphs makes no others")


def eager_split_bytes(shape: AttentionShape, num_processors: int) -> int:
    """Bytes that any eager step needs for partial results. FA2 splits contexts only until the tiles of one KV head use
    its share of two thread blocks for each of the GPU's multiprocessors."""
    tile = 128 if shape.head_dim < 256 else 64
    tiles = 2 * num_processors // shape.num_kv_heads
    return shape.num_q_heads * tiles * tile * (shape.head_dim + 1) * 4 + 2**20


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    cuda: Any = torch.cuda
    return cuda.get_device_properties(device).multi_processor_count


def graph_split_bytes(shape: AttentionShape, rows: int) -> int:
    """Bytes that a captured step of `rows` rows needs for partial results: float32, one tile per row and a few more."""
    group = shape.num_q_heads // shape.num_kv_heads
    tile = _DECODE_TILES[group > _DECODE_TILES[0]]
    tiles = rows + blocks_for(rows * group, tile)
    return shape.num_q_heads * tiles * tile * (shape.head_dim + 1) * 4 + 2**20


def plan_decode(
    wrapper: Any, shape: AttentionShape, cache_dtype: torch.dtype, indptr: Tensor, indices: Tensor, last: Tensor
) -> None:
    """indptr, last: in host memory, so that planning does not wait for a copy; indices: on the device."""
    wrapper.plan(
        indptr,
        indices,
        last,
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        **_scores(shape),
        q_data_type=shape.dtype,
        kv_data_type=cache_dtype,
        non_blocking=True,
    )


def _scores(shape: AttentionShape) -> dict[str, Any]:
    """Scale, window and soft cap as arguments of flashinfer's plans. Its windows do not count a row's own position."""
    left = -1 if shape.window is None else shape.window - 1
    return {"sm_scale": shape.scale, "window_left": left, "logits_soft_cap": shape.soft_cap}
