"""Messages for pooling models: a node gets texts and answers with vectors or scores. Pure data."""

from __future__ import annotations

from typing import NamedTuple

from common.control.identities import AttemptKey, Ids


class PoolInput(NamedTuple):
    """One text, or a pair of texts, for a pooling model."""

    token_ids: Ids
    second_at: int = 0
    """Index at which the second segment of a pair begins, whose token type is 1; 0 means that there is one segment."""


class PoolRequest(NamedTuple):
    """Asks a node of a pooling model for the vector of each input. The answer is one `PoolResult`, or `AttemptFailed`."""

    key: AttemptKey
    inputs: list[PoolInput]
    normalize: bool = True
    """Whether vectors are scaled to length 1, and the scores of a cross-encoder pass its activation function."""
    dimensions: int = 0
    """Leading dimensions to keep; 0: all."""
    per_token: bool = False
    """Whether to return one vector per token instead of one per input."""
    timeout_s: float = 60.0


class PoolResult(NamedTuple):
    """The answer to a `PoolRequest`."""

    key: AttemptKey
    vectors: list[bytes]
    """One entry per input, float32 in little endian: an embedding has shape [dimensions], with `per_token` [tokens,
    dimensions], and the score of a cross-encoder [1].
    """
