"""The tokens that penalties count: `TokenCounter` keeps them beside each sequence, on the leader's engine thread.

`SeenTokens` is sent to the sampling rank with every draw: ranks keep no state, and an attempt that continues another
one counts the same tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.control.messages import SamplingParams


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
    """Whether penalties need the tokens that were generated before."""
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
        """Count generated tokens."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1

    def seen(self) -> SeenTokens:
        """All that was counted."""
        return SeenTokens(self._ids.tobytes(), self._counts.tobytes())
