"""From logits to tokens on a device, without the host ever waiting. Runs on the engine thread of the rank that samples.

The same tokens as `common.engine.sampling.host_sampler`, which says what each filter means: the numbers that decide are the very same;
what may differ is the last bit of a sum or a logarithm. `DeviceDraws.wait` is the one place where a host waits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.control.messages import SamplingParams, TokenLogprobs
from common.engine.device_inputs import to_device
from common.engine.sampling.device_penalties import adjusted_on_device, put
from common.engine.sampling.gumbel import key, winners
from common.engine.sampling.host_sampler import GREEDY_BELOW, no_token
from common.engine.sampling.top_k_top_p import Bisection, FlashInferThresholds, Thresholds, nucleus_edge, ordered
from common.engine.step import SampledToken, SampleSpec


class DeviceSampler:
    """A `common.engine.sampling.base.Sampler` for logits on any device. flashinfer: the imported package, None: do without."""

    def __init__(self, flashinfer: Any = None) -> None:
        self._thresholds: Thresholds = Bisection() if flashinfer is None else FlashInferThresholds(flashinfer)

    def draw(self, logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> DeviceDraws:
        """See `Sampler.draw`."""
        highest, best = logits.max(-1)
        wanted = adjusted_on_device(logits, specs, unseen)
        tokens = best if wanted is logits else wanted.argmax(-1)
        drawing = [row for row, spec in enumerate(specs) if spec.params.temperature >= GREEDY_BELOW]
        filtered = [row for row in drawing if _is_filtered(specs[row], logits.size(1))]
        free = [row for row in drawing if not _is_filtered(specs[row], logits.size(1))]
        for rows in (free, filtered):
            if rows:
                index = to_device(rows, logits.device)
                of_rows = wanted if len(rows) == len(specs) else wanted.index_select(0, index)
                likeliest = tokens.index_select(0, index)
                drawn = self._race(of_rows, likeliest, [specs[row] for row in rows], filtered=rows is filtered)
                tokens = tokens.index_copy(0, index, drawn)
        return DeviceDraws(tokens, highest, specs, _logprobs(logits, highest, tokens, specs))

    def nothing(self, device: torch.device) -> DeviceDraws:
        """See `Sampler.nothing`."""
        return DeviceDraws(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device), [], [])

    def _race(self, rows: Tensor, likeliest: Tensor, specs: list[SampleSpec], *, filtered: bool) -> Tensor:
        """One token for each of `rows`, [r, vocab]; its likeliest, [r], where that is not finite: then all are made zero,
        because no kernel promises an end or an index in range for NaN."""
        params = [spec.params for spec in specs]
        top = rows.gather(1, likeliest[:, None])
        finite = top.isfinite()
        temperature = _column([p.temperature for p in params], rows.device).float()
        scaled = torch.where(finite, (rows - top) / temperature, 0.0)
        if filtered:
            scaled = self._filtered(scaled, params)
        keys = np.array([key(spec.params.seed, spec.position) for spec in specs], np.uint32)
        drawn = winners(scaled.exp_(), put(keys.view(np.int32), rows.device))
        return torch.where(finite.squeeze(1), drawn, likeliest)

    def _filtered(self, scaled: Tensor, params: list[SamplingParams]) -> Tensor:
        """-inf for what may not be drawn."""
        vocab = scaled.size(1)
        min_p = [min(0.0, math.log(p.min_p)) if p.min_p > 0.0 else -math.inf for p in params]
        cut = _column(min_p, scaled.device).float()
        if any(0 < p.top_k < vocab for p in params):
            count = to_device([p.top_k if 0 < p.top_k < vocab else vocab for p in params], scaled.device)[:, None]
            kth = self._thresholds.of_count(scaled, count)
            cut = torch.where(count < vocab, cut.maximum(kth), cut)
        scaled = torch.where(scaled >= cut, scaled, -torch.inf)
        if any(p.top_p < 1.0 for p in params):
            top_p = _column([p.top_p for p in params], scaled.device)
            edge = nucleus_edge(scaled, top_p, self._thresholds)
            scaled = torch.where((top_p >= 1.0) | (scaled >= edge), scaled, -torch.inf)
        return scaled


class DeviceDraws:
    """One step's tokens, on their way to the host."""

    def __init__(self, token_ids: Tensor, highest: Tensor, specs: list[SampleSpec], logprobs: list[Tensor]) -> None:
        """highest: [n], each row's highest raw logit. logprobs: as of `_logprobs`."""
        self.token_ids = token_ids
        self._specs = specs
        self._arriving = [_to_host(each) for each in (token_ids, highest, *logprobs)]
        self._arrived: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[SampledToken]:
        """See `Draws.wait`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, highest, *logprobs = [each.tolist() for each in self._arriving]
        of_row = iter(zip(*logprobs, strict=True))
        out: list[SampledToken] = []
        for token, top_logit, spec in zip(tokens, highest, self._specs, strict=True):
            count, wanted = spec.params.logprobs, None
            if count is not None:
                own, top_ids, top = next(of_row)
                wanted = TokenLogprobs(own, top_ids[:count], top[:count])
            out.append(SampledToken(token, wanted) if math.isfinite(top_logit) else no_token(top_logit, spec))
        return out


def _is_filtered(spec: SampleSpec, vocab: int) -> bool:
    params = spec.params
    return params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < vocab


def _logprobs(logits: Tensor, highest: Tensor, tokens: Tensor, specs: list[SampleSpec]) -> list[Tensor]:
    """For the rows that want them: log-probability of the token [m], ids [m, k] and log-probabilities [m, k] of the
    likeliest, equal ones by id. Empty where no row does."""
    wanting = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    if not wanting:
        return []
    index = to_device(wanting, logits.device)
    rows, top = logits.index_select(0, index), highest.index_select(0, index)[:, None]
    norm = top.double() + (rows - top).exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    own = rows.gather(1, tokens.index_select(0, index)[:, None]).double() - norm
    vocab = logits.size(1)
    count = min(vocab, max(specs[row].params.logprobs or 0 for row in wanting))
    later = torch.arange(vocab - 1, -1, -1, device=logits.device)
    ids = ((ordered(rows).long() << 32) | later).topk(count).indices
    return [own.squeeze(1), ids, rows.gather(1, ids).double() - norm]


def _column(values: list[float], device: torch.device) -> Tensor:
    array: NDArray[np.float64] = np.array(values, np.float64)
    return put(array, device)[:, None]


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
