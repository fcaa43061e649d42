"""Runs a draft head on one rank: its KV, and the hidden rows that it reads. Runs on the engine thread.

The rows are in the KV memory, one for each token slot. So a relay, the prefix cache and copies of blocks carry them with
the KV, and a position can be computed wherever the one before it was.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from common.attention.base import AttentionBackend
from common.engine.device_inputs import StepRows, to_device
from common.engine.step import StepInput
from common.kv.storage import KVStorage
from common.model.draft_head import DraftHead
from common.model.draft_head_description import HIDDEN_PLANE


class HeadRunner:
    """A head with the memory of its hidden rows."""

    def __init__(self, head: DraftHead, storage: KVStorage, attention: AttentionBackend) -> None:
        self._head = head
        self._attention = attention
        self._block_size = storage.layout.spec.block_size
        plane = storage.groups[-1].planes[HIDDEN_PLANE]
        self._rows = plane.view(-1, plane.size(-1))
        """[slots, hidden]"""
        self.logits = head.logits

    def extend(
        self, step: StepInput, rows: StepRows, hidden: Tensor, on_layer: Callable[[int], None] | None = None
    ) -> None:
        """Write the KV of a step's rows. hidden: what the model computed for them, in the form that `DraftHead.features` takes.
        `on_layer`: called for both layers of the head, when their KV is final."""
        self._rows.index_copy_(0, rows.slots[0], self._head.features(hidden).to(self._rows.dtype))
        self._head.extend(rows.token_ids, rows.positions, self._before(step), self._attention)
        if on_layer is not None:
            on_layer(self._head.layer)
            on_layer(self._head.layer + 1)

    def forward(self, step: StepInput, rows: StepRows) -> Tensor:
        """Compute a step of the head (`StepInput.by_head`). Returns [T, hidden], for `logits`."""
        hidden = self._head.forward(rows.token_ids, rows.positions, self._before(step), self._attention)
        self._rows.index_copy_(0, rows.slots[0], hidden.to(self._rows.dtype))
        return hidden

    def _before(self, step: StepInput) -> Tensor:
        """[T, hidden], the hidden row of the position before each row; any at position 0."""
        return self._rows.index_select(0, to_device(slots_before(step, self._block_size), self._rows.device))


def slots_before(step: StepInput, block_size: int) -> list[int]:
    """For each row of a step, the slot of the position before it; any slot for position 0."""
    slots = [0, *step.slot_mapping[0][:-1]]
    row = 0
    for table, count in zip(step.block_tables[0], step.query_lens, strict=True):
        before = max(0, step.positions[row] - 1)
        slots[row] = table[before // block_size] * block_size + before % block_size
        row += count
    return slots
