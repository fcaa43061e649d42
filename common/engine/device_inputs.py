"""Converts a step to the inputs of one rank's model and attention. Rows go to the device in one asynchronous copy.

Runs on a rank's engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    slots: Tensor


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
    parts = (step.token_ids, step.positions, step.slot_mapping)
    values = to_device([value for part in parts for value in part], device)
    return StepRows(*values.split([len(part) for part in parts]))


def attention_metadata(step: StepInput, slots: Tensor) -> AttentionMetadata:
    """The batch for attention; every row of a decoding sequence is a separate entry. slots: [T]."""
    num_seqs, lens = step.num_decodes, step.query_lens[: step.num_decodes]
    num_rows = sum(lens)
    if num_rows == num_seqs:
        return AttentionMetadata(step.query_lens, step.context_lens, step.block_tables, slots, num_rows)
    contexts: list[int] = []
    tables: list[list[int]] = []
    for query_len, context_len, table in zip(lens, step.context_lens, step.block_tables, strict=False):
        contexts += range(context_len - query_len + 1, context_len + 1)
        tables += [table] * query_len
    return AttentionMetadata(
        [1] * num_rows + step.query_lens[num_seqs:],
        contexts + step.context_lens[num_seqs:],
        tables + step.block_tables[num_seqs:],
        slots,
        num_rows,
    )
