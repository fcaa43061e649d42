"""Repetition, frequency and presence penalties, in this order, for tokens that came before (`SampleSpec.seen`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.engine.device_inputs import array_to_device
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep, Row
from common.engine.step import SampleSpec


class Penalties(LogitsStep):
    """Changes the logits of the tokens that were seen."""

    for_greedy = True

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.seen is not None]

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        assert spec.seen is not None
        params, logits = spec.params, row.writable()
        ids = np.frombuffer(spec.seen.ids, np.int32)
        counts = np.frombuffer(spec.seen.counts, np.int32)
        values: Row = logits[ids]
        if params.repetition_penalty != 1.0:
            factor = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / factor, values * factor)
        values -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[ids] = values

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        """A token that `unseen` adds counts once more, or is the first of its kind."""
        specs, device, unseen = rows.specs, rows.device, rows.unseen
        logits = rows.writable()
        ids = [np.frombuffer(spec.seen.ids if spec.seen else b"", np.int32) for spec in specs]
        counts = [np.frombuffer(spec.seen.counts if spec.seen else b"", np.int32) for spec in specs]
        owners = array_to_device(np.repeat(np.arange(len(specs)), [each.size for each in ids]), device)
        tokens = array_to_device(np.concatenate(ids).astype(np.int64), device)
        count = array_to_device(np.concatenate(counts).astype(np.float32), device)
        params = [(s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty) for s in specs]
        factors = array_to_device(np.array(params, np.float32), device)
        if unseen is None:
            logits.index_put_((owners, tokens), _penalized(logits[owners, tokens], count, factors[owners]))
            return
        again = tokens == unseen[owners]
        logits.index_put_((owners, tokens), _penalized(logits[owners, tokens], count + again, factors[owners]))
        known = torch.zeros(len(specs), dtype=torch.int64, device=device).index_add_(0, owners, again.long())
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
