"""What a sequence keeps for its drafts. Engine thread; plain data."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.speculation.acceptance import Acceptance
from common.engine.speculation.token_index import TokenIndex


@dataclass
class SequenceDrafts:
    """What a sequence keeps for its proposals."""

    acceptance: Acceptance
    index: TokenIndex | None = None
    match: int = 0
    """`Proposal.match` of the latest drafts."""
    skipped: int = 0
    """How many proposals in a row were not drafted."""
