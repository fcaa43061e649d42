"""The KV of a draft model: which of its blocks each sequence holds, and how many leading positions have KV of known tokens. Pure.

The blocks are a pool of their own with a prefix cache of its own, because the target's KV is often there without the draft's: a
relayed prompt brings the target's only. A block is published when all its tokens are known, so that a hash never promises KV of
guesses. Used by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.base.hashing import BLOCK_SIZE
from common.engine.sequence import Sequence
from common.engine.sequence_state import SequenceState
from common.engine.speculation.sequence_drafts import DraftKV
from common.kv.pool import BlockPool
from common.kv.rank_layout import blocks_for

_HOLDS = (SequenceState.RUNNING, SequenceState.YIELDING)


@dataclass
class DraftBlocks:
    """The draft KV of all sequences that draft.

    Invariant: the first `DraftKV.num_computed` positions of a sequence have KV of its known tokens, then of `DraftKV.guessed`.
    """

    pool: BlockPool
    held: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences whose `drafts.kv` has blocks."""

    def hold(self, seq: Sequence, num_slots: int) -> DraftKV | None:
        """The KV of a sequence whose tokens are all known, with blocks for `num_slots` tokens; None if the pool has too few. What
        was computed for guesses that turned out wrong, and at the last token, counts as not computed."""
        drafts = seq.drafts
        assert drafts is not None
        kv = drafts.kv
        if kv is None:
            hashes = seq.full_block_hashes()[: (seq.num_tokens - 1) // BLOCK_SIZE]
            blocks = self.pool.match(hashes)
            self.pool.acquire(blocks)
            kv = drafts.kv = DraftKV(blocks, len(blocks) * BLOCK_SIZE, len(blocks))
            self.held.append(seq)
        self._advance(seq, kv)
        missing = blocks_for(num_slots) - len(kv.blocks)
        if missing > self.pool.num_idle:
            return None
        kv.blocks += self.pool.allocate(max(0, missing))
        return kv

    def _advance(self, seq: Sequence, kv: DraftKV) -> None:
        """Keep what was right of the guesses, and publish the blocks that are full."""
        start = kv.num_computed - len(kv.guessed)
        kv.num_computed = min(start + num_equal(kv.guessed, seq.tokens.ids[start:]), seq.num_tokens - 1)
        kv.guessed = []
        full = kv.num_computed // BLOCK_SIZE
        if full > kv.num_published:
            hashes = seq.full_block_hashes()
            for index in range(kv.num_published, full):
                self.pool.publish(kv.blocks[index], hashes[index])
            kv.num_published = full

    def release_ended(self) -> None:
        """Take the blocks of sequences that do not run any more."""
        for seq in [seq for seq in self.held if seq.state not in _HOLDS]:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Take the blocks of a sequence that holds some; published ones stay in the prefix cache."""
        drafts = seq.drafts
        assert drafts is not None
        assert drafts.kv is not None
        self.held.remove(seq)
        self.pool.release(drafts.kv.blocks)
        drafts.kv = None

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        for seq in self.held:
            assert seq.drafts is not None
            kv = seq.drafts.kv
            assert kv is not None, f"{seq.key} holds no draft KV"
            assert len(kv.blocks) * BLOCK_SIZE >= kv.num_computed, f"{seq.key} computed past its draft blocks"
            known = kv.num_computed - len(kv.guessed)
            assert kv.num_published * BLOCK_SIZE <= known <= seq.num_tokens, f"{seq.key} published guesses"


def num_equal(one: Seq[int], other: Seq[int]) -> int:
    """Count the leading tokens that are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
