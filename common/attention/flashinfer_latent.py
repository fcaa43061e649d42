"""Absorbed latent attention by flashinfer, on CUDA, straight from the KV blocks. Runs on a rank's engine thread.

One kernel takes decode rows and the few rows of a prompt that are absorbed. It reads latents and rotated keys as two parts
of one plane. Plans wait for the copies of the previous one, as in `common.attention.flashinfer`.
"""

from __future__ import annotations

from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from common.attention.base import AttentionMetadata
from common.attention.block_lists import block_lists, host_int32, longest_table
from common.attention.flashinfer import Fence
from common.attention.latent import LatentShape, append_rows
from common.kernels.flashinfer_kernels import DTYPES
from common.kv.storage import GroupStorage

_SPLIT_BYTES = 128 * 2**20
"""Workspace for partial results of contexts that are split over several thread blocks: what flashinfer recommends."""
_WIDTHS = (512, 64)
"""Widths of latent and rotated key that its kernels are compiled for."""


def unsupported_reason(shape: LatentShape, cache_dtype: torch.dtype) -> str:
    """Why flashinfer has no kernel for these latents; empty if it has one."""
    widths = (shape.latent_dim, shape.head_dim - shape.latent_dim)
    if shape.dtype not in DTYPES:
        return f"flashinfer attends in 16 bits, the model computes in {shape.dtype}"
    if widths != _WIDTHS:
        return f"flashinfer has kernels for latents and rotated keys of {_WIDTHS}, the model's have {widths}"
    if cache_dtype != shape.dtype:
        return f"flashinfer reads no latents of {cache_dtype} for {shape.dtype} queries"
    return ""


class FlashInferLatent:
    """`AttentionBackend` for the absorbed part of `LatentBackend`.

    Its `for_graph` backends share its workspace, so all their steps must run on one stream.
    """

    def __init__(
        self,
        kv: GroupStorage,
        shape: LatentShape,
        flashinfer: ModuleType,
        workspace: Tensor | None = None,
        graph_rows: int = 0,
    ) -> None:
        """`unsupported_reason` must be empty. `graph_rows`: decode rows of each step, in static memory; 0: any step."""
        self._kv, self._shape, self._flashinfer = kv, shape, flashinfer
        (plane,) = kv.planes.values()
        self._pages = [layer[:, 0].split(_WIDTHS, 2) for layer in plane]
        device = kv.device
        self._pinned = device.type == "cuda"
        self._fence = Fence(device)
        self._workspace = (
            torch.zeros(_SPLIT_BYTES, dtype=torch.uint8, device=device) if workspace is None else workspace
        )
        self._slots = torch.zeros(graph_rows, dtype=torch.int64, device=device)
        self._is_static = graph_rows > 0
        buffers = {
            name: torch.zeros(size, dtype=torch.int32, device=device)
            for name, size in (
                ("qo_indptr", graph_rows + 1),
                ("kv_indptr", graph_rows + 1),
                ("kv_indices", graph_rows * longest_table(shape, kv.num_blocks)),
                ("kv_len_arr", graph_rows),
            )
        }
        self._wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
            self._workspace, use_cuda_graph=self._is_static, **(buffers if self._is_static else {}), backend="auto"
        )

    def plan(self, metadata: AttentionMetadata) -> None:
        shape = self._shape
        lens = metadata.query_lens, metadata.context_lens
        lists = block_lists(shape, *lens, metadata.block_tables, pinned=self._pinned)
        self._fence.wait()
        if self._is_static:
            self._slots.copy_(metadata.slot_mapping, non_blocking=True)
        else:
            self._slots = metadata.slot_mapping
        self._wrapper.plan(
            host_int32([0, *accumulate(metadata.query_lens)], pinned=self._pinned),
            lists.indptr,
            lists.indices.to(self._kv.device, non_blocking=True),
            host_int32(metadata.context_lens, pinned=self._pinned),
            shape.num_q_heads,
            *_WIDTHS,
            shape.block_size,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=self._kv.dtype,
        )
        self._fence.mark()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, heads/tp, 576]; k: [T, 1, 576], latent and rotated key; v: the same. Returns [T, heads/tp, 512]."""
        append_rows(self._kv, layer, self._slots, k)
        latents, keys = q.split(_WIDTHS, 2)
        return self._wrapper.run(latents, keys, *self._pages[layer])

    def for_graph(self, rows: int) -> FlashInferLatent:
        return FlashInferLatent(self._kv, self._shape, self._flashinfer, self._workspace, rows)
