"""One simulated request, from its arrival to its end. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.base.hashing import BlockHash
from common.control.messages import AttemptKey

NO_KEY = AttemptKey("", 0)


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request of a trace, and how it was served. Times are seconds of virtual time, -1 while unknown."""

    number: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hashes: Sequence[BlockHash]
    """One name per block of the prompt, including the partial last one, as in traces."""
    session: str = ""
    private_blocks: int = 0
    """Blocks for its answer, in addition to those of the prompt."""
    prefill_node: Any = None
    """None: the decode node computes the prompt itself."""
    decode_node: Any = None
    hit_blocks: int = 0
    """Leading blocks that the node which computed the prompt had cached."""
    decode_hit_blocks: int = 0
    """Leading blocks that the decode node had cached."""
    granted: bool = False
    prefill_began_s: float = -1.0
    first_token_s: float = -1.0
    finished_s: float = -1.0
    sent_bytes: float = 0.0
    key: AttemptKey = NO_KEY
    """The key under which the router counts the request's legs."""

    def hit_tokens(self, block_tokens: int, blocks: int) -> int:
        """Tokens of the first `blocks` blocks; after a full hit the last token is still computed."""
        return min(blocks * block_tokens, self.input_tokens - 1)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for an answer of one token."""
        if self.output_tokens < 2:
            return 0.0
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)
