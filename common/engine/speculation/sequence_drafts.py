"""What a sequence keeps for its drafts. Engine thread; plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.engine.speculation.acceptance import Acceptance
from common.engine.speculation.token_index import TokenIndex


@dataclass
class DraftKV:
    """KV of a sequence in a draft model's own blocks: `common.engine.draft_kv`."""

    blocks: list[int]
    num_computed: int
    """Leading positions that have KV, those of guesses included."""
    num_published: int
    """Leading blocks that were entered in the draft's prefix cache, as far as it held them."""
    guessed: list[int] = field(default_factory=list[int])
    """Tokens of the last of these positions, which were guesses when they were computed."""


@dataclass
class SequenceDrafts:
    """What a sequence keeps for its proposals."""

    acceptance: Acceptance
    index: TokenIndex | None = None
    kv: DraftKV | None = None
    """None: it has no blocks of a draft model."""
    match: int = 0
    """`Proposal.match` of the latest drafts."""
    skipped: int = 0
    """How many proposals in a row were not drafted."""
