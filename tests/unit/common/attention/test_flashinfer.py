"""Which models flashinfer has kernels for, and the workspace that its plans need."""

from __future__ import annotations

import pytest
import torch
from support import fake_flashinfer

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.flashinfer import (
    FlashInferAttention,
    eager_split_bytes,
    graph_split_bytes,
    unsupported_reason,
)
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

LAYOUT = KVLayout("f", KVSpec.uniform(1, 2, 64, "bfloat16"))


def shape(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, max_context: int = 0) -> AttentionShape:
    return AttentionShape(4, 2, head_dim, dtype, 16, max_context)


def test_models_that_flashinfer_has_no_kernels_for() -> None:
    assert not unsupported_reason(shape(), torch.bfloat16)
    assert not unsupported_reason(shape(), torch.float8_e4m3fn)
    assert not unsupported_reason(shape(torch.float16, 128), torch.float16)
    assert "16 bits" in unsupported_reason(shape(torch.float32), torch.float32)
    assert "heads" in unsupported_reason(shape(head_dim=80), torch.bfloat16)
    assert "cache" in unsupported_reason(shape(), torch.float32)


def test_a_context_beyond_the_longest_is_refused_instead_of_written_past_its_memory() -> None:
    storage = KVStorage(LAYOUT, LAYOUT.shard(0, 0), 8)
    graph = FlashInferAttention(storage.groups[0], shape(max_context=32), fake_flashinfer).for_graph(1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="more than the 2 of the longest"):
        graph.plan(AttentionMetadata([1], [33], [[0, 1, 2]], torch.tensor([32])))


def test_partial_results_of_long_prompts_get_the_workspace_that_flashinfer_plans() -> None:
    """128 query heads over 8 KV heads on the 132 multiprocessors of an H200: 33 tiles of 128 rows for each KV head."""
    wide = AttentionShape(128, 8, 128, torch.bfloat16, 16)
    planned = 128 * 33 * 128 * 129 * 4
    assert 256 * 2**20 < planned <= eager_split_bytes(wide, 132)
    # Each of eight ranks needs as much.
    one_of_eight = AttentionShape(16, 1, 128, torch.bfloat16, 16)
    assert eager_split_bytes(one_of_eight, 132) >= 16 * 264 * 128 * 129 * 4


def test_partial_results_of_large_captured_steps_get_the_workspace_that_flashinfer_plans() -> None:
    """64 query heads of 128 over 8 KV heads, 512 rows: 767 tiles of 16 rows, their values and sums in float32."""
    large = AttentionShape(64, 8, 128, torch.bfloat16, 16)
    assert graph_split_bytes(large, 512) >= 64 * (512 * 8 // 16 + 511) * 16 * 129 * 4
