"""Single logits of a batch, as indices on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.device_inputs import to_device


def places(entries: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """`entries`: (row, token id). Returns both columns, [len(entries)] int64 each."""
    return to_device([row for row, _ in entries], device), to_device([token_id for _, token_id in entries], device)
