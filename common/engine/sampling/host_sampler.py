"""From logits to tokens. Runs on the engine thread of the rank that holds the head.

The token at position i depends only on its logits and (seed, i), and hardly on the logits' last bits (`common.engine.sampling.gumbel`).
Each row is treated alone, so that a result does not depend on the batch, the node or the attempt. Order and meaning of
the filters are vLLM's: bans, biases, penalties (`common.engine.sampling.penalties`), temperature, min_p, top_k, top_p; those that equal the last
one that a filter lets through stay. Log-probabilities are of the raw logits, before all of these.

NumPy, not torch, because its reductions over one row of a vocabulary are faster on a CPU and start no threads.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.control.messages import SamplingParams, TokenLogprobs
from common.engine.sampling.gumbel import key, winner
from common.engine.sampling.penalties import Row, adjusted
from common.engine.step import SampledToken, SampleSpec

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM: dividing by them would overflow."""
_NUCLEUS_DEPTHS = (4.0, 8.0, 16.0)
"""Logits below the maximum at which a nucleus is looked for before the whole vocabulary is sorted."""


def sample(logits: Tensor, specs: list[SampleSpec]) -> list[SampledToken]:
    """Draw one token per row. logits: [n, vocab] float32, row i for `specs[i]`; not changed.

    A row without a finite maximum (a NaN anywhere in it, or an overflow) gets a `SampledToken` with an error.
    """
    rows: NDArray[np.float32] = logits.cpu().numpy()
    most_likely: list[int] = rows.argmax(-1).tolist()
    out: list[SampledToken] = []
    for row, best, spec in zip(rows, most_likely, specs, strict=True):
        if not math.isfinite(row[best]):  # argmax takes a NaN for the maximum
            out.append(no_token(float(row[best]), spec))
            continue
        params = spec.params
        wanted = adjusted(row, spec)
        plain = params.temperature < GREEDY_BELOW and wanted is row
        token = best if plain else _draw(wanted, params, spec.position)
        logprobs = None if params.logprobs is None else _logprobs(row, token, params.logprobs)
        out.append(SampledToken(token, logprobs))
    return out


def no_token(highest: float, spec: SampleSpec) -> SampledToken:
    """For a row whose highest logit is not finite."""
    return SampledToken(-1, error=f"the model computed {highest} as the highest logit at position {spec.position}")


def _draw(row: Row, params: SamplingParams, position: int) -> int:
    top = row.max()
    if params.temperature < GREEDY_BELOW or not math.isfinite(top):
        return int(row.argmax())
    scaled: Row = (row - top) / np.float32(params.temperature)
    of = key(params.seed, position)
    cut = _cut(scaled, params)
    if params.top_p < 1.0:
        ids = _nucleus(scaled, params.top_p, cut)
    elif cut > -math.inf:
        ids = np.flatnonzero(scaled >= cut)
    else:
        return winner(np.exp(scaled), of)
    return int(ids[winner(np.exp(scaled[ids]), of, ids)])


def _cut(scaled: Row, params: SamplingParams) -> float:
    """The lowest scaled logit that min_p and top_k let through, -inf if they are off. The maximum is 0."""
    cut = -math.inf
    if params.min_p > 0.0:
        cut = min(0.0, math.log(params.min_p))
    if 0 < params.top_k < scaled.size:
        # Ties with the k-th stay, as in vLLM. min_p only ever removes a tail, so the two cuts combine by max.
        cut = max(cut, float(np.partition(scaled, scaled.size - params.top_k)[scaled.size - params.top_k]))
    return cut


def _nucleus(scaled: Row, top_p: float, cut: float) -> NDArray[np.int64]:
    """Ids of the shortest leading part that holds `top_p` of what `cut` lets through."""
    ids, weights = _ranked(scaled, -_NUCLEUS_DEPTHS[0] if cut == -math.inf else cut)
    needed = top_p * float(weights.sum())
    if cut == -math.inf:  # a sort of those near the maximum does where they hold it
        needed = top_p * float(np.exp(scaled).sum(dtype=np.float64))
        for depth in (*_NUCLEUS_DEPTHS[1:], math.inf):
            if weights.sum() >= needed:
                break
            ids, weights = _ranked(scaled, -depth)
    last = min(int(np.searchsorted(np.cumsum(weights), needed)), ids.size - 1)
    return ids[weights >= weights[last]]


def _ranked(row: Row, cut: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of all entries >= cut, highest first, equal ones by id; and exp of each."""
    ids = np.flatnonzero(row >= cut)
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], np.exp(values[order].astype(np.float64))


def _logprobs(row: Row, token: int, count: int) -> TokenLogprobs:
    """log-softmax of `row` at `token` and at the `count` most likely, equal ones by id."""
    top = row.max()
    norm = float(top) + math.log(float(np.exp(row - top).sum(dtype=np.float64)))
    count = min(count, row.size)
    top_ids: list[int] = []
    if count:
        kth = row.size - count
        ids, _ = _ranked(row, float(np.partition(row, kth)[kth]))
        top_ids = ids[:count].tolist()
    return TokenLogprobs(float(row[token]) - norm, top_ids, [float(row[i]) - norm for i in top_ids])
