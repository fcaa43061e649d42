"""Log-probabilities of raw logits in tensors, on any device, without the host ever waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from common.engine.device_inputs import to_device
from common.engine.sampling.top_k_top_p import ordered


def logprobs_of(
    rows: Tensor, highest: Tensor, tokens: Tensor, count: int, named: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of each row's token [m]; ids [m, k] and log-probabilities [m, k] of the most likely tokens, k the
    lesser of `count` and the vocabulary, ties by lower id; and [m], the logarithms of the sums of exponentials. All but the
    ids are float64.

    `named`: the first ids of a row instead, at most k, by the row.
    rows: [m, vocab] float32, raw logits; highest: [m], their maxima; tokens: [m] int64.
    """
    top, vocab = highest[:, None], rows.size(1)
    norm = top.double() + (rows - top).exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    own = (rows.gather(1, tokens[:, None]).double() - norm).squeeze(1)
    if count == 0:
        return own, tokens.new_empty((len(rows), 0)), norm.new_empty((len(rows), 0)), norm.squeeze(1)
    later = torch.arange(vocab - 1, -1, -1, device=rows.device)
    ids = ((ordered(rows).long() << 32) | later).topk(min(vocab, count)).indices
    for row, wanted in named.items():
        ids[row, : len(wanted)] = to_device(list(wanted), rows.device)
    return own, ids, rows.gather(1, ids).double() - norm, norm.squeeze(1)


def to_host(x: Tensor) -> Tensor:
    """A copy of `x` in host memory, complete once an event recorded after this call is."""
    if not x.is_cuda:
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def recorded_event(x: Tensor) -> torch.cuda.Event | None:
    """An event after all work so far on the device of `x`; None on a CPU."""
    if not x.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event
