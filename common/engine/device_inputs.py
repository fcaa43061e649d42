"""A step's rows on the device: one copy, which the host does not wait for. Runs on a rank's engine thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.step import StepInput


@dataclass(frozen=True)
class StepRows:
    """What the model computes from. All [T] int64, on the device."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor


def staged(values: list[int], device: torch.device) -> Tensor:
    """`values` as int64 where a copy to `device` needs no wait: in pinned memory for a card, else in plain one.

    Pinned memory goes back to PyTorch's own pool, which hands it out again only after the copies from it.
    """
    host = torch.tensor(values, dtype=torch.int64)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(values: list[int], device: torch.device) -> Tensor:
    """[len(values)] int64 on `device`."""
    return staged(values, device).to(device, non_blocking=True)


def rows_of(step: StepInput, device: torch.device) -> StepRows:
    """The rows of one step in fresh memory."""
    parts = (step.token_ids, step.positions, step.slot_mapping)
    values = to_device([value for part in parts for value in part], device)
    return StepRows(*values.split([len(part) for part in parts]))
