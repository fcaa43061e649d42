"""`common.engine.sampling.penalties.adjusted` for a whole batch on a device. Runs on the engine thread of the rank that samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.device_inputs import to_device
from common.engine.step import SampleSpec


def put(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, by a copy that the host does not wait for."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def adjusted_on_device(logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> Tensor:
    """[n, vocab] as each request wants its row. A changed copy, or `logits` itself where nothing was asked for.

    unseen: as of `common.engine.sampling.base.Sampler.draw`.
    """
    vocab = logits.size(1)
    bans = [
        (row, token)
        for row, spec in enumerate(specs)
        if spec.num_generated < spec.params.min_tokens
        for token in spec.params.stop_token_ids
        if 0 <= token < vocab
    ]
    biases = [
        (row, token, bias)
        for row, spec in enumerate(specs)
        for token, bias in spec.params.logit_bias
        if 0 <= token < vocab
    ]
    if not bans and not biases and all(spec.seen is None for spec in specs):
        return logits
    logits = logits.clone()
    if bans:
        logits.index_put_(_places(bans, logits.device), logits.new_full((), -math.inf))
    if biases:
        values = put(np.array([bias for _, _, bias in biases], np.float32), logits.device)
        logits.index_put_(_places(biases, logits.device), values, accumulate=True)
    if any(spec.seen is not None for spec in specs):
        _penalize(logits, specs, unseen)
    return logits


def _places(entries: list[Any], device: torch.device) -> tuple[Tensor, Tensor]:
    return to_device([entry[0] for entry in entries], device), to_device([entry[1] for entry in entries], device)


def _penalize(logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> None:
    """Change the rows that have penalties. A token that `unseen` adds counts once more, or is the first of its kind."""
    device = logits.device
    ids = [np.frombuffer(spec.seen.ids if spec.seen else b"", np.int32) for spec in specs]
    counts = [np.frombuffer(spec.seen.counts if spec.seen else b"", np.int32) for spec in specs]
    rows = put(np.repeat(np.arange(len(specs)), [each.size for each in ids]), device)
    tokens = put(np.concatenate(ids).astype(np.int64), device)
    count = put(np.concatenate(counts).astype(np.float32), device)
    params = [(s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty) for s in specs]
    factors = put(np.array(params, np.float32), device)
    if unseen is None:
        logits.index_put_((rows, tokens), _penalized(logits[rows, tokens], count, factors[rows]))
        return
    again = tokens == unseen[rows]
    logits.index_put_((rows, tokens), _penalized(logits[rows, tokens], count + again, factors[rows]))
    known = torch.zeros(len(specs), dtype=torch.int64, device=device).index_add_(0, rows, again.long())
    own = torch.arange(len(specs), device=device)
    first = unseen.clamp(min=0)
    values = logits[own, first]
    fresh = (unseen >= 0) & (known == 0)
    changed = _penalized(values, torch.ones_like(values), factors)
    logits.index_put_((own, first), torch.where(fresh, changed, values))


def _penalized(values: Tensor, count: Tensor, factors: Tensor) -> Tensor:
    """values, count: [m]; factors: [m, 3], repetition, frequency and presence penalty."""
    repetition, frequency, presence = factors.unbind(-1)
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * count - presence * (count > 0)
