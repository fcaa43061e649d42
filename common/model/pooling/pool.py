"""Rows of a batch of inputs without padding, and one vector for each input from its tokens' hidden states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from common.model.pooling.sentence_transformers import Pooling


def pool(mode: Pooling, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """One vector for each input, [inputs, hidden], from the hidden states of all tokens, [tokens, hidden]."""
    if mode == "cls":
        return hidden[starts(lengths)]
    if mode == "lasttoken":
        return hidden[torch.tensor(lengths).cumsum(0) - 1]
    parts = hidden.split(list(lengths))
    return torch.stack([part.mean(0) if mode == "mean" else part.amax(0) for part in parts])


def starts(lengths: Sequence[int]) -> Tensor:
    """Row of the first token of each input."""
    return torch.tensor([0, *lengths[:-1]]).cumsum(0)


def same_length(lengths: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Rows of the tokens of the inputs of each length."""
    rows: defaultdict[int, list[int]] = defaultdict(list)
    begin = 0
    for length in lengths:
        rows[length].extend(range(begin, begin + length))
        begin += length
    return [(torch.tensor(each), length) for length, each in rows.items()]
