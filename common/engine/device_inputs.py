"""Converts a step to the inputs of one rank's model and attention. Rows go to the device in one asynchronous copy.

Runs on a rank's engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.attention.base import AttentionMetadata
from common.engine.step import StepInput


@dataclass(frozen=True)
class StepRows:
    """The model's inputs. All [T] int64, on the device."""

    token_ids: Tensor
    positions: Tensor
    slots: tuple[Tensor, ...]
    """One for each block table."""

    @classmethod
    def split(cls, values: Tensor, num_rows: int) -> StepRows:
        """values: [(2 + tables) * num_rows], one part after the other."""
        token_ids, positions, *slots = values.view(-1, num_rows).unbind()
        return cls(token_ids, positions, tuple(slots))

    def first(self, num_rows: int) -> StepRows:
        """Views of the first rows."""
        slots = tuple(each[:num_rows] for each in self.slots)
        return StepRows(self.token_ids[:num_rows], self.positions[:num_rows], slots)


def staged(values: list[int], device: torch.device) -> Tensor:
    """`values` as int64 in host memory that can be copied to `device` asynchronously: pinned for a GPU.

    PyTorch's pool of pinned memory reuses it only after the copies from it are done.
    """
    host = torch.tensor(values, dtype=torch.int64)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(values: list[int], device: torch.device) -> Tensor:
    """[len(values)] int64 on `device`."""
    return staged(values, device).to(device, non_blocking=True)


def array_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, copied asynchronously."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def column_to_device(values: list[float], device: torch.device) -> Tensor:
    """[len(values), 1] float64 on `device`."""
    return array_to_device(np.array(values, np.float64), device)[:, None]


def rows_of(step: StepInput, device: torch.device) -> StepRows:
    """The rows of one step in fresh memory."""
    parts = (step.token_ids, step.positions, *step.slot_mapping)
    return StepRows.split(to_device([value for part in parts for value in part], device), len(step.token_ids))


def entries_of(step: StepInput) -> tuple[list[int], list[int], list[list[list[int]]]]:
    """Query lengths, context lengths and block tables for attention: every row of a decoding sequence is an entry of its own."""
    query_lens, context_lens, num_seqs = step.query_lens, step.context_lens, step.num_decode_seqs
    lens, tables = query_lens[:num_seqs], step.block_tables
    num_rows = sum(lens)
    if num_rows != num_seqs:
        query_lens = [1] * num_rows + query_lens[num_seqs:]
        ends = zip(lens, context_lens, strict=False)
        context_lens = [*(c for n, end in ends for c in range(end - n + 1, end + 1)), *context_lens[num_seqs:]]
        tables = [
            [*(each for n, each in zip(lens, table, strict=False) for _ in range(n)), *table[num_seqs:]]
            for table in tables
        ]
    return query_lens, context_lens, tables


def attention_metadata(
    step: StepInput, slots: Sequence[Tensor], pad: int = 0, pad_block: int = 0, row_bounds: tuple[int, ...] = ()
) -> AttentionMetadata:
    """The batch for attention; every row of a decoding sequence is a separate entry. slots: for each block table [T + pad].

    `pad` decode rows follow, with a context of one token in `pad_block`; then all sequences must decode.
    """
    query_lens, context_lens, tables = entries_of(step)
    num_rows = sum(step.query_lens[: step.num_decode_seqs])
    if pad:
        query_lens, context_lens = query_lens + [1] * pad, context_lens + [1] * pad
        tables = [table + [[pad_block]] * pad for table in tables]
    batches = [
        AttentionMetadata(query_lens, context_lens, table, own, num_rows + pad, row_bounds)
        for table, own in zip(tables, slots, strict=True)
    ]
    return batches[0] if len(batches) == 1 else replace(batches[0], others=tuple(batches[1:]))
