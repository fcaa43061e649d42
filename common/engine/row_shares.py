"""Which rows of a step each context-parallel rank computes outside attention. Pure, no torch.

A prompt chunk's rows are shared out in equal, contiguous parts: what embedding, linear layers and experts cost does not depend on
a row's position. Attention to the chunk is shared out by blocks instead (`common.attention.striped`), which balances causal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from common.engine.step import StepInput

FEWEST_ROWS = 32
"""Fewest rows of a rank's share. The time of fewer is that of reading the weights, which every rank reads anyway."""


def row_bounds(step: StepInput, ranks: int) -> tuple[int, ...]:
    """Rank i computes rows [bounds[i], bounds[i + 1]). Empty: every rank computes all rows."""
    rows = len(step.token_ids)
    if ranks == 1 or step.num_decode_seqs == len(step.query_lens) or rows < FEWEST_ROWS * ranks:
        return ()
    return tuple(rows * i // ranks for i in range(ranks + 1))


def lens_between(query_lens: Sequence[int], lo: int, hi: int) -> list[int]:
    """How many of each sequence's rows are among rows [lo, hi)."""
    ends = accumulate(query_lens)
    return [max(0, min(end, hi) - max(end - count, lo)) for count, end in zip(query_lens, ends, strict=True)]
