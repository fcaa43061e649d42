"""What changes a row of logits before a token is drawn: bans, biases, penalties for tokens that stood before.

`TokenCounter` runs on the leader's engine thread, beside the sequence; `adjusted` on the rank that samples. Between
them goes `SeenTokens`, anew with every step: ranks keep no state, and an attempt that continues another one counts
the same tokens. Order and meaning are vLLM's: bans, biases, repetition, frequency, presence.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.control.messages import SamplingParams

if TYPE_CHECKING:
    from common.engine.step import SampleSpec

Row = NDArray[np.float32]


@dataclass(frozen=True)
class SeenTokens:
    """Distinct tokens of a sequence, as native int32 arrays of equal length; at most the vocabulary."""

    ids: bytes
    counts: bytes
    """How often each was generated; 0: it is in the prompt only."""


def with_token(seen: SeenTokens, token_id: int) -> SeenTokens:
    """`seen` after one more token was generated."""
    ids, counts = np.frombuffer(seen.ids, np.int32), np.frombuffer(seen.counts, np.int32)
    here = ids == token_id
    if not here.any():
        return SeenTokens(seen.ids + np.int32(token_id).tobytes(), seen.counts + np.int32(1).tobytes())
    return SeenTokens(seen.ids, (counts + here).astype(np.int32).tobytes())


def counts_tokens(params: SamplingParams) -> bool:
    """Whether what was generated before matters."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


class TokenCounter:
    """Counts a sequence's tokens as they come, one dictionary look-up each."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._ids, self._counts = array("i"), array("i")
        if params.repetition_penalty != 1.0:  # the only one that looks at the prompt
            self._ids = array("i", dict.fromkeys(prompt_ids))
            self._counts = array("i", bytes(4 * len(self._ids)))
        self._places = {token_id: place for place, token_id in enumerate(self._ids)}

    def add(self, token_ids: Sequence[int]) -> None:
        """These were generated."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1

    def seen(self) -> SeenTokens:
        """All that was counted."""
        return SeenTokens(self._ids.tobytes(), self._counts.tobytes())


def adjusted(row: Row, spec: SampleSpec) -> Row:
    """`row` as this request wants it: [vocab] logits. A changed copy, or `row` itself where nothing was asked for."""
    params = spec.params
    banned = _inside(params.stop_token_ids, row.size) if spec.num_generated < params.min_tokens else []
    if not banned and not params.logit_bias and spec.seen is None:
        return row
    row = row.copy()
    if banned:
        row[banned] = -np.inf
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < row.size:
            row[token_id] += np.float32(bias)
    if spec.seen is not None:
        _penalize(row, spec.seen, params)
    return row


def _inside(token_ids: list[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]


def _penalize(row: Row, seen: SeenTokens, params: SamplingParams) -> None:
    ids = np.frombuffer(seen.ids, np.int32)
    counts = np.frombuffer(seen.counts, np.int32)
    values: Row = row[ids]
    if params.repetition_penalty != 1.0:
        factor = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / factor, values * factor)
    values -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    values -= np.float32(params.presence_penalty) * (counts > 0)
    row[ids] = values
