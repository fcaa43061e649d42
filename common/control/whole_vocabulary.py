"""Log-probabilities of a whole vocabulary in messages: bytes, because a frame has too few items for lists. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from common.base.errors import ProtocolError
from common.control.messages import PromptLogprobs, TokenLogprobs

_NORM = struct.Struct("<d")


def packed(logits: NDArray[np.float32], norm: float) -> bytes:
    """logits: [vocab], raw; norm: the logarithm of the sum of their exponentials. A log-probability is their difference in
    float64, to the last bit what the lists of most likely tokens have."""
    return _NORM.pack(norm) + logits.astype("<f4", copy=False).tobytes()


def most_likely_of(found: TokenLogprobs | PromptLogprobs) -> Iterator[tuple[int, float]]:
    """Token ids with their log-probabilities, most likely first, ties by lower id.

    Raises: ProtocolError if the bytes are malformed.
    """
    if not found.whole:
        return zip(found.top_ids, found.top_logprobs, strict=True)
    if len(found.whole) % 4 or len(found.whole) <= _NORM.size:
        raise ProtocolError(f"malformed log-probabilities: {len(found.whole)} bytes")
    (norm,) = _NORM.unpack_from(found.whole)
    logits = np.frombuffer(found.whole, "<f4", offset=_NORM.size)
    ids = np.argsort(-logits, kind="stable")
    return zip(ids.tolist(), (logits[ids].astype(np.float64) - norm).tolist(), strict=True)
