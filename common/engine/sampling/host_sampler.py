"""From logits to tokens on the host. Runs on the engine thread of the rank that has the LM head.

The token at position i depends only on its logits and (seed, i), and hardly on the logits' last bits
(`common.engine.sampling.gumbel`). Each row is treated alone, so that a result does not depend on the batch, the node or
the attempt. Log-probabilities are of the raw logits, before all of `common.engine.sampling.logits_steps`.

NumPy, not torch, because its reductions over one row of a vocabulary are faster on a CPU and start no threads.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.control.messages import TokenLogprobs
from common.engine.sampling.base import GREEDY_BELOW, no_token, none_allowed
from common.engine.sampling.gumbel import gumbel_argmax, noise_key
from common.engine.sampling.log_sum_exp import LogSumExp, log_sum_exp
from common.engine.sampling.logits_steps import steps_of
from common.engine.sampling.ranking import most_likely
from common.engine.sampling.steps.base import HostRow, LogitsStep, Row
from common.engine.seen_tokens import with_token
from common.engine.step import SampledToken, SampleSpec


class HostSamplerOutput:
    """Tokens that were drawn at once."""

    def __init__(self, tokens: list[SampledToken]) -> None:
        self._tokens = tokens

    @property
    def token_ids(self) -> Tensor:
        # The next step may have a placeholder for a token that was not drawn, in a row that is then discarded.
        return torch.tensor([max(token.token_id, 0) for token in self._tokens])

    def wait(self) -> list[SampledToken]:
        return self._tokens


class HostSampler:
    """A `common.engine.sampling.base.Sampler` that copies logits to the host."""

    def __init__(self, sums: LogSumExp = log_sum_exp) -> None:
        """`sums`: for log-probabilities."""
        self._sums = sums

    def sample(self, logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> HostSamplerOutput:
        if unseen is not None:
            tokens = unseen.tolist()
            specs = [
                spec._replace(seen=with_token(spec.seen, token)) if spec.seen is not None and token >= 0 else spec
                for spec, token in zip(specs, tokens, strict=True)
            ]
        return HostSamplerOutput(sample(logits, specs, self._sums))

    def empty(self, device: torch.device) -> HostSamplerOutput:
        return HostSamplerOutput([])


def sample(logits: Tensor, specs: list[SampleSpec], sums: LogSumExp = log_sum_exp) -> list[SampledToken]:
    """Draw one token per row. logits: [n, vocab] float32, row i for `specs[i]`; not changed.

    A row without a finite maximum (a NaN anywhere in it, or an overflow), or without any token that is allowed, gets a
    `SampledToken` with an error.
    """
    rows: NDArray[np.float32] = logits.cpu().numpy()
    bests: list[int] = rows.argmax(-1).tolist()
    norms = _norms(rows, bests, specs, sums)
    out: list[SampledToken] = []
    for index, (best, spec, steps) in enumerate(zip(bests, specs, steps_of(specs, rows.shape[1]), strict=True)):
        row = rows[index]
        if not math.isfinite(row[best]):  # argmax takes a NaN for the maximum
            out.append(no_token(float(row[best]), spec))
            continue
        token = _draw(HostRow(row, best), spec, steps) if steps else best
        if token is None:
            out.append(none_allowed(spec))
            continue
        count = spec.params.logprobs
        out.append(SampledToken(token, None if count is None else _logprobs(row, norms[index], token, count)))
    return out


def _draw(row: HostRow, spec: SampleSpec, steps: list[LogitsStep]) -> int | None:
    """None if the steps left no token."""
    for step in steps:
        step.on_host(row, spec)
    if spec.params.temperature < GREEDY_BELOW:
        best = row.argmax()
        return best if row.values[best] > -math.inf else None
    if row.the_token is not None:
        return None if row.none_left else row.the_token
    key = noise_key(spec.params.seed, spec.position)
    if row.candidates is None and row.cut > -math.inf:
        row.candidates = np.flatnonzero(row.values >= row.cut)
    if row.candidates is None:
        return gumbel_argmax(np.exp(row.values), key)
    return int(row.candidates[gumbel_argmax(np.exp(row.values[row.candidates]), key, row.candidates)])


def _norms(rows: NDArray[np.float32], bests: list[int], specs: list[SampleSpec], sums: LogSumExp) -> dict[int, float]:
    """What log-softmax subtracts, for each row whose log-probabilities are wanted."""
    highest = {
        index: float(rows[index, best])
        for index, (best, spec) in enumerate(zip(bests, specs, strict=True))
        if spec.params.logprobs is not None and math.isfinite(rows[index, best])
    }
    if not highest:
        return {}
    found = sums(rows, list(highest), list(highest.values()))
    return {index: top + total for (index, top), total in zip(highest.items(), found, strict=True)}


def _logprobs(row: Row, norm: float, token: int, count: int) -> TokenLogprobs:
    """log-softmax of `row` at `token` and at the `count` most likely, ties by lower id."""
    top_ids = most_likely(row, count)
    return TokenLogprobs(float(row[token]) - norm, top_ids, [float(row[i]) - norm for i in top_ids])
