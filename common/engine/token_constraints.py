"""Which tokens a request's own parameters exclude from a draw. On the leader's engine thread; pure.

Everything here is a function of the request and of the tokens generated before the draw, so that every attempt and node
agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def mask_of(token_ids: Iterable[int]) -> bytes:
    """A `SampleSpec.mask` that allows only these tokens."""
    ids = np.array(list(token_ids), np.int64)
    bits = np.zeros((int(ids.max()) // 32 + 1) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32).tobytes()


def both(mask: bytes | None, other: bytes | None) -> bytes | None:
    """The tokens that both masks allow."""
    if mask is None or other is None:
        return other if mask is None else mask
    size = min(len(mask), len(other))
    return (np.frombuffer(mask[:size], np.int32) & np.frombuffer(other[:size], np.int32)).tobytes()


def completed_by(words: Sequence[Sequence[int]], generated: Sequence[int]) -> list[int]:
    """The tokens that would complete one of `words` (token sequences) after the `generated` tokens."""
    size = len(generated)
    return [
        word[-1]
        for word in words
        if len(word) <= size + 1 and list(word[:-1]) == list(generated[size - len(word) + 1 :])
    ]
