"""Joining the partial attention of several stripes: exact, and without NaN where a row sees nothing of a stripe.

`test_conformance.py` runs every case of paged attention over stripes.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.striped_attention import AttentionInStripes

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.striped import TorchPartialAttention, join_partials
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

ROWS, HEADS, DIM, TOKENS = 3, 2, 4, 24


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores: [rows, heads, tokens]; values: [heads, tokens, dim]."""
    if not scores.size(2):
        return torch.zeros(ROWS, HEADS, DIM), torch.full((ROWS, HEADS), -math.inf)
    return torch.einsum("rht,htd->rhd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("cuts", [[24], [0, 24], [24, 24], [1, 2, 24], [0, 0, 13, 24], [8, 16, 24]])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e5])
def test_partial_results_join_to_attention_over_everything(cuts: list[int], has_sinks: bool, size: float) -> None:
    torch.manual_seed(1)
    scores, values = size * torch.randn(ROWS, HEADS, TOKENS), torch.randn(HEADS, TOKENS, DIM)
    sinks = size * torch.randn(HEADS) if has_sinks else None
    parts = [attend(scores[..., lo:hi], values[:, lo:hi]) for lo, hi in zip([0, *cuts], [*cuts, TOKENS], strict=False)]
    results, log_sums = (torch.stack(each) for each in zip(*parts, strict=True))
    joined = join_partials(results, log_sums, sinks)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(ROWS, -1, 1)], 2)
        values = torch.cat([values, torch.zeros(HEADS, 1, DIM)], 1)
    torch.testing.assert_close(joined, attend(scores, values)[0], atol=1e-5, rtol=1e-5)


def test_a_row_that_no_stripe_sees_anything_of_is_zero() -> None:
    nothing = torch.zeros(2, ROWS, HEADS, DIM), torch.full((2, ROWS, HEADS), -math.inf)
    assert torch.equal(join_partials(*nothing), torch.zeros(ROWS, HEADS, DIM))


def test_the_first_tokens_of_a_sequence_are_on_one_rank_and_the_others_add_nothing() -> None:
    layout = KVLayout("m", KVSpec.uniform(1, 1, DIM, "float32"))
    storage = KVStorage(layout, layout.shard(0, 0), 4)
    storage.data.view(torch.float32).fill_(math.nan)  # what an unused block may hold
    shape = AttentionShape(HEADS, 1, DIM, torch.float32, 16)
    backend = AttentionInStripes(storage.groups[0], shape, 4, TorchPartialAttention)
    q, k, v = torch.randn(5, HEADS, DIM), torch.randn(5, 1, DIM), torch.randn(5, 1, DIM)
    backend.plan(AttentionMetadata([1, 4], [1, 4], [[2], [3]], torch.tensor([32, 48, 49, 50, 51]), 1))
    out = backend.forward(0, q, k, v)
    assert torch.equal(out[0], v[0].expand(HEADS, DIM)), "the only token that it sees"
    assert out.isfinite().all()
