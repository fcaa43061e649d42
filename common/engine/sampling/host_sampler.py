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

from common.control.messages import WHOLE_VOCABULARY, TokenLogprobs
from common.control.whole_vocabulary import packed
from common.engine.sampling.base import GREEDY_BELOW, no_token, none_allowed
from common.engine.sampling.gumbel import gumbel_argmax, noise_key
from common.engine.sampling.logits_steps import steps_of
from common.engine.sampling.ranking import most_likely
from common.engine.sampling.row_passes import Draw, Row, RowPasses, Sum
from common.engine.sampling.steps.base import HostRow, LogitsStep
from common.engine.seen_tokens import with_token
from common.engine.step import SampledToken, SampleSpec

_TOGETHER = 8
"""How many changed rows may wait for their random draws: few enough to stay in cache."""


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

    def __init__(self, passes: RowPasses | None = None) -> None:
        self._passes = passes or RowPasses()
        self._scratch: NDArray[np.float32] = np.empty((0, 0), np.float32)

    def sample(self, logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> HostSamplerOutput:
        if not specs:
            return HostSamplerOutput([])
        if unseen is not None:
            tokens = unseen.tolist()
            specs = [
                spec._replace(seen=with_token(spec.seen, token)) if spec.seen is not None and token >= 0 else spec
                for spec, token in zip(specs, tokens, strict=True)
            ]
        return self.sample_rows(np.ascontiguousarray(logits.cpu().numpy()), specs)

    def sample_rows(self, rows: NDArray[np.float32], specs: list[SampleSpec]) -> HostSamplerOutput:
        """Draw a token for each row of logits on the host, [n, vocab]."""
        bests: list[int] = rows.argmax(-1).tolist()
        highest = [rows.item(index, best) for index, best in enumerate(bests)]
        # argmax takes a NaN for the maximum.
        finite = [index for index, top in enumerate(highest) if math.isfinite(top)]
        drawn = self._draw(rows, bests, specs, finite)
        wanted = [index for index in finite if specs[index].params.logprobs is not None and drawn[index] is not None]
        sums = dict(zip(wanted, self._passes.sums(rows, wanted, [highest[i] for i in wanted]), strict=True))
        out: list[SampledToken] = []
        for index, (top, spec) in enumerate(zip(highest, specs, strict=True)):
            token, found = drawn.get(index), sums.get(index)
            if token is None:
                out.append(none_allowed(spec) if index in drawn else no_token(top, spec))
            else:
                logprobs = None if found is None else _logprobs(rows[index], top, found, token, spec)
                out.append(SampledToken(token, logprobs))
        return HostSamplerOutput(out)

    def _draw(
        self, rows: NDArray[np.float32], bests: list[int], specs: list[SampleSpec], indices: list[int]
    ) -> dict[int, int | None]:
        """The tokens of rows that have a finite maximum; None where the steps left no token."""
        steps = steps_of(specs, rows.shape[1])
        drawn: dict[int, int | None] = {index: bests[index] for index in indices}
        changed = [index for index in indices if steps[index]]
        if not changed:
            return drawn
        if self._scratch.shape[1] != rows.shape[1]:
            self._scratch = np.empty((_TOGETHER, rows.shape[1]), np.float32)
        undecided: dict[int, Draw] = {}

        def draw_undecided() -> None:
            drawn.update(zip(undecided, self._passes.draw(list(undecided.values())), strict=True))
            undecided.clear()

        for index in changed:
            row = HostRow(rows[index], bests[index], self._scratch[len(undecided)], self._passes)
            found = _draw(row, specs[index], steps[index])
            if not isinstance(found, Draw):
                drawn[index] = found
                continue
            undecided[index] = found
            if len(undecided) == _TOGETHER:
                draw_undecided()
        draw_undecided()
        return drawn


def _draw(row: HostRow, spec: SampleSpec, steps: list[LogitsStep]) -> int | Draw | None:
    """A token, or a draw from all tokens that the steps left; None if they left no token."""
    for step in steps:
        step.on_host(row, spec)
    if spec.params.temperature < GREEDY_BELOW:
        best = row.argmax()
        return best if row.values[best] > -math.inf else None
    if row.the_token is not None:
        return None if row.none_left else row.the_token
    key = noise_key(spec.params.seed, spec.position)
    if row.candidates is None and row.cut > -math.inf:
        row.candidates = np.flatnonzero(row.scaled() >= row.cut)
    if row.candidates is None:
        return Draw(row.values, row.top, row.temperature, key)
    return int(row.candidates[gumbel_argmax(np.exp(row.scaled()[row.candidates]), key, row.candidates)])


def _logprobs(row: Row, highest: float, found: Sum, token: int, spec: SampleSpec) -> TokenLogprobs:
    """log-softmax of `row` at `token`, and at the tokens that the request names, or at the most likely ones that it asks for, ties
    by lower id."""
    norm, params = highest + found.value, spec.params
    if params.logprobs == WHOLE_VOCABULARY:
        return TokenLogprobs(float(row[token]) - norm, [], [], packed(row, norm))
    top_ids = list(params.logprob_token_ids) or most_likely(row, found.maxima, params.logprobs or 0)
    return TokenLogprobs(float(row[token]) - norm, top_ids, [float(row[i]) - norm for i in top_ids])
