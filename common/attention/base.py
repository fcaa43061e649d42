"""The interface between model code and an attention backend.

Once per step the runner calls `plan` with the batch's shape; then every layer calls `forward`, which first appends the
new K and V to the paged cache and then attends. All layers share what `plan` derives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """The shape of one step's batch; the fields have the same meaning as in `StepInput`."""

    query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    slot_mapping: Tensor
    """[T], int64, on the cache's device."""
    num_decode_rows: int = 0
    """The first `num_decode_rows` entries are decode rows: one row each, even if several belong to one sequence. The others
    are prompt chunks."""
    row_bounds: tuple[int, ...] = ()
    """Where context-parallel ranks share the rows out: `forward` of rank i takes and returns rows [row_bounds[i], row_bounds[i + 1]).
    Empty: every rank has all rows."""
    others: tuple[AttentionMetadata, ...] = ()
    """The same batch for block tables 1, 2, ... of `LayerGroup.table`; this is the one for table 0."""


@dataclass(frozen=True)
class PlannedPrompt:
    """One sequence of a batch, with rows [row_lo, row_hi)."""

    row_lo: int
    row_hi: int
    context_len: int
    """Tokens in `blocks`, which begin where the first row's window does."""
    blocks: Tensor
    """The KV blocks in the backend's own form."""


class AttentionBackend(Protocol):
    """Paged attention over one rank's KV cache. Not thread-safe; `forward` calls belong to the latest `plan`."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare for the next step's `forward` calls, one per layer."""
        ...

    def forward(self, layer: int, *rows: Any, **options: Any) -> Tensor:
        """Append a step's rows to layer `layer` (counted from this rank's first), then attend causally.

        A kind of attention and its backends agree on the rows. "multi_head" gives q: [T, q_heads/tp, head_dim], and k, v:
        [T, kv_heads/tp, head_dim], rope applied; it gets [T, q_heads/tp, head_dim], q's dtype.
        """
        ...

    def for_graph(self, rows: int) -> AttentionBackend:
        """A backend over the same cache for batches of exactly `rows` decode rows, in static memory.

        Its `plan` copies into that memory and may work on the CPU; its `forward` may be captured in a CUDA graph.
        """
        ...


@dataclass(frozen=True)
class AttentionShape:
    """The facts about a layer's attention on one rank that a backend needs. Layers of equal shape, in one layer group, share
    a backend. A kind of attention may add facts in a subclass."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """The dtype of queries and results; the cache may have another dtype."""
    block_size: int
    max_context: int = 0
    """Tokens of the longest sequence, which bounds the memory of `for_graph`; 0 means all that the cache holds."""
    scale: float | None = None
    """Factor for the products of queries and keys; None means 1/sqrt(head_dim)."""
    window: int | None = None
    """Sliding window in tokens: a row at position p attends to positions (p - window, p]; None means all up to p. Blocks
    wholly before the windows of all rows of an entry are not read, so its table may have any block in their place."""
    soft_cap: float | None = None
    """c in c * tanh(score / c), of scores after the scale; None means no cap."""
    sinks: tuple[Tensor, ...] = field(default=(), compare=False)
    """For each layer that the shape is for, [num_q_heads] float32: a score that joins the softmax of each row of a head,
    without a value. Empty means none."""
    kind: str = "multi_head"
    """A key of `common.attention.choose.BACKENDS`."""

    @property
    def value_dim(self) -> int:
        """Width of a head's result: the leading features that are used."""
        return self.head_dim
