"""The named tensors that a pipeline stage hands to the next one, as one message. Runs on ranks' engine threads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Tensors begin at multiples of this many bytes of a message."""


@dataclass(frozen=True)
class StageTensor:
    """One tensor of a hand-over: [rows of the step, *shape]."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


StageSchema = tuple[StageTensor, ...]
"""All that a stage hands over. Both stages know it, so that a message carries nothing else."""


def pack(tensors: Mapping[str, Tensor], schema: Sequence[StageTensor]) -> Tensor:
    """The message: a single tensor as it is, several copied to one [bytes] uint8."""
    given = [tensors[each.name] for each in schema]
    rows = given[0].size(0)
    for tensor, each in zip(given, schema, strict=True):
        assert tensor.dtype == each.dtype, (each, tensor.dtype)
        assert tensor.shape == (rows, *each.shape), (each, tensor.shape)
    if len(given) == 1:
        return given[0]
    message = empty_message(rows, schema, given[0].device)
    for tensor, place in zip(given, unpack(message, rows, schema).values(), strict=True):
        place.copy_(tensor)
    return message


def empty_message(rows: int, schema: Sequence[StageTensor], device: torch.device) -> Tensor:
    """Memory for the message of a step of `rows` rows."""
    if len(schema) == 1:
        return torch.empty(rows, *schema[0].shape, dtype=schema[0].dtype, device=device)
    return torch.empty(_ends(rows, schema)[-1], dtype=torch.uint8, device=device)


def unpack(message: Tensor, rows: int, schema: Sequence[StageTensor]) -> dict[str, Tensor]:
    """The tensors in a message, which share its memory."""
    if len(schema) == 1:
        return {schema[0].name: message}
    starts = [0, *_ends(rows, schema)]
    return {
        each.name: message[start : start + _size(rows, each)].view(each.dtype).view(rows, *each.shape)
        for each, start in zip(schema, starts, strict=False)
    }


def _size(rows: int, tensor: StageTensor) -> int:
    return rows * math.prod(tensor.shape) * tensor.dtype.itemsize


def _ends(rows: int, schema: Sequence[StageTensor]) -> list[int]:
    """Where the next tensor of the message may begin after each."""
    return list(accumulate(-(-_size(rows, each) // _ALIGNMENT) * _ALIGNMENT for each in schema))
