"""What a client wants pooled, and how it is split into parts for nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from common.control.codec import MAX_MESSAGE_BYTES
from common.control.pooling import PoolInput
from router.requests.queued_request import NOBODY, Tenant

MAX_PART_INPUTS = 128
"""Inputs of one part."""
MAX_PART_TOKENS = 8192
"""Tokens of one part, unless a single input is longer."""
_MIN_PART_TOKENS = 512
"""Least tokens of a part when work is spread over nodes: every part costs a message and a step."""
MAX_PART_RESULT_BYTES = MAX_MESSAGE_BYTES - 2**16
"""Bytes of one part's vectors, which come back in one message."""


@dataclass(frozen=True)
class PoolWork:
    """The inputs of one client's call, or of one part of it.

    `width`: float32 values of one vector; `dimensions`: as in `PoolRequest`.
    """

    model: str
    """Name under which the nodes registered the model."""
    inputs: Sequence[PoolInput]
    width: int
    normalize: bool = True
    dimensions: int = 0
    per_token: bool = False
    tenant: Tenant = NOBODY
    priority: int = 0

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.inputs)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest input."""
        return max((len(each.token_ids) for each in self.inputs), default=0)

    def result_bytes(self, pool_input: PoolInput) -> int:
        """Size of the vectors of one input."""
        return 4 * self.width * (len(pool_input.token_ids) if self.per_token else 1)


def split(work: PoolWork, num_nodes: int) -> list[range]:
    """Indices of the inputs of each part, in order.

    A part has at most `MAX_PART_INPUTS` inputs and, unless it has one input, `MAX_PART_TOKENS` tokens and
    `MAX_PART_RESULT_BYTES` of vectors. Work that would fit into one part is spread over `num_nodes` if it is large enough.
    """
    share = -(-work.num_tokens // max(1, num_nodes))
    max_tokens = min(MAX_PART_TOKENS, max(_MIN_PART_TOKENS, share))
    parts: list[range] = []
    begin = tokens = size = 0
    for index, each in enumerate(work.inputs):
        more_tokens, more_bytes = len(each.token_ids), work.result_bytes(each)
        full = index - begin >= MAX_PART_INPUTS or tokens + more_tokens > max_tokens
        if index > begin and (full or size + more_bytes > MAX_PART_RESULT_BYTES):
            parts.append(range(begin, index))
            begin, tokens, size = index, 0, 0
        tokens += more_tokens
        size += more_bytes
    if work.inputs:
        parts.append(range(begin, len(work.inputs)))
    return parts
