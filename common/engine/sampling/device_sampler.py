"""From logits to tokens on a device, without the host ever waiting. Runs on the engine thread of the rank that samples.

Draws the same tokens as `common.engine.sampling.host_sampler`: the random numbers are equal, and only the last bit of a
sum or a logarithm may differ. `DeviceSamplerOutput.wait` is the one place where a host waits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.control.messages import WHOLE_VOCABULARY, TokenLogprobs
from common.control.whole_vocabulary import packed
from common.engine.device_inputs import array_to_device, to_device
from common.engine.sampling.base import GREEDY_BELOW, no_token, none_allowed
from common.engine.sampling.gumbel import gumbel_argmax_on_device, noise_key
from common.engine.sampling.logits_steps import FILTERS, GREEDY_STEPS, RANDOM_STEPS
from common.engine.sampling.logprobs import logprobs_of, recorded_event, to_host
from common.engine.sampling.steps.base import DeviceRows, LogitsStep
from common.engine.sampling.top_k_top_p import FlashInferThresholds, Thresholds
from common.engine.step import SampledToken, SampleSpec


class DeviceSampler:
    """A `common.engine.sampling.base.Sampler` for logits on any device. flashinfer: the imported package, None: do without."""

    def __init__(self, flashinfer: Any = None) -> None:
        self._thresholds = Thresholds() if flashinfer is None else FlashInferThresholds(flashinfer)

    def sample(self, logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> DeviceSamplerOutput:
        highest, best = logits.max(-1)
        rows = DeviceRows(logits, specs, unseen, self._thresholds)
        _apply(GREEDY_STEPS, rows)
        left, tokens = (highest, best) if rows.values is logits else rows.values.max(-1)
        # Filters cost passes over the vocabulary: unfiltered rows are sampled separately.
        random = [index for index, spec in enumerate(specs) if spec.params.temperature >= GREEDY_BELOW]
        filtered = {index for step in FILTERS for index in step.asked_for(specs, logits.size(1))} if random else set()
        for group in ([each for each in random if each not in filtered], [each for each in random if each in filtered]):
            if group:
                index = to_device(group, logits.device)
                values = rows.values if len(group) == len(specs) else rows.values.index_select(0, index)
                part = DeviceRows(values, [specs[each] for each in group], None, self._thresholds)
                part.most_likely = tokens.index_select(0, index)
                tokens = tokens.index_copy(0, index, _draw(part))
        return DeviceSamplerOutput(tokens, highest, left, specs, _logprobs(logits, highest, tokens, specs))


def _apply(steps: tuple[LogitsStep, ...], rows: DeviceRows) -> None:
    for step in steps:
        asked = step.asked_for(rows.specs, rows.raw.size(1))
        if asked:
            step.on_device(rows, asked)


def _draw(rows: DeviceRows) -> Tensor:
    """[n], one random token for each row; its most likely one where that logit is not finite."""
    finite = rows.values.gather(1, rows.most_likely[:, None]).isfinite().squeeze(1)
    _apply(RANDOM_STEPS, rows)
    rows.apply_cut()
    keys = np.array([noise_key(spec.params.seed, spec.position) for spec in rows.specs], np.uint32)
    drawn = gumbel_argmax_on_device(rows.values.exp_(), array_to_device(keys.view(np.int32), rows.device))
    return torch.where(finite, drawn, rows.most_likely)


class DeviceSamplerOutput:
    """One step's tokens, on their way to the host."""

    def __init__(
        self, token_ids: Tensor, highest: Tensor, left: Tensor, specs: list[SampleSpec], logprobs: list[Tensor]
    ) -> None:
        """highest, left: [n], each row's highest raw logit, and the highest after masks and bans. logprobs: what
        `_logprobs` returns."""
        self.token_ids = token_ids
        self._specs = specs
        self._arriving = [to_host(each) for each in (token_ids, highest, left, *logprobs)]
        self._arrived = recorded_event(token_ids)

    def wait(self) -> list[SampledToken]:
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, highest, left, *logprobs = [each.tolist() for each in self._arriving[:7]]
        of_row = iter(zip(*logprobs, strict=True))
        whole = iter(self._arriving[7].numpy() if logprobs else ())
        out: list[SampledToken] = []
        for token, top_logit, top_left, spec in zip(tokens, highest, left, self._specs, strict=True):
            count, wanted = spec.params.logprobs, None
            if count is not None:
                own, top_ids, top, norm = next(of_row)
                if count == WHOLE_VOCABULARY:
                    wanted = TokenLogprobs(own, [], [], packed(next(whole), norm))
                else:
                    wanted = TokenLogprobs(own, top_ids[:count], top[:count])
            if not math.isfinite(top_logit):
                out.append(no_token(top_logit, spec))
            else:
                out.append(none_allowed(spec) if top_left == -math.inf else SampledToken(token, wanted))
        return out


def _logprobs(logits: Tensor, highest: Tensor, tokens: Tensor, specs: list[SampleSpec]) -> list[Tensor]:
    """What `logprobs_of` returns for the rows that want log-probabilities, and the logits of those that want the whole
    vocabulary. Empty if no row wants any."""
    wanting = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    if not wanting:
        return []
    index = to_device(wanting, logits.device)
    count = max(0, *(specs[row].params.logprobs or 0 for row in wanting))
    rows = [each.index_select(0, index) for each in (logits, highest, tokens)]
    named = {at: ids for at, row in enumerate(wanting) if (ids := specs[row].params.logprob_token_ids)}
    whole = [row for row in wanting if specs[row].params.logprobs == WHOLE_VOCABULARY]
    logits = logits.index_select(0, to_device(whole, logits.device)) if whole else logits[:0]
    return [*logprobs_of(rows[0], rows[1], rows[2], count, named), logits]
