"""The messages of pooling models: texts go to a node, vectors or scores come back. Pure data."""

from __future__ import annotations

from typing import NamedTuple

from common.control.identities import AttemptKey
from common.control.ids import Ids


class PoolInput(NamedTuple):
    """One text, or a pair of texts, for a pooling model."""

    token_ids: Ids
    second_at: int = 0
    """Index where the second segment of a pair begins, whose token type is 1; 0: there is one segment."""


class PoolRequest(NamedTuple):
    """Compute the vector of each input at a node of a pooling model. The answer is one `PoolResult`, or `AttemptFailed`."""

    key: AttemptKey
    inputs: list[PoolInput]
    normalize: bool = True
    dimensions: int = 0
    """Leading dimensions to keep; 0: all."""
    per_token: bool = False
    """Return one vector per token, not one per input."""
    timeout_s: float = 60.0


class PoolResult(NamedTuple):
    """The answer to a `PoolRequest`."""

    key: AttemptKey
    vectors: list[bytes]
    """float32, little endian, one entry per input: [dimensions] of an embedding, [tokens, dimensions] with `per_token`,
    [1] for the score of a cross-encoder.
    """
