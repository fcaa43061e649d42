"""A proposer that knows the answers, and is wrong as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from common.engine.sequence import Sequence
from common.engine.speculation.token_index import Proposal


class NoisyDrafts:
    """Proposes the next tokens of each answer, except for one in `wrong_in` tokens."""

    name = "noisy"

    def __init__(self, seed: int, wrong_in: int, vocab: int, answer: Callable[[Sequence], list[int]]) -> None:
        self._draw = random.Random(seed)
        self._wrong_in = wrong_in
        self._vocab = vocab
        self._answer = answer

    def propose(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[Proposal]:
        return [self._propose(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose(self, seq: Sequence, limit: int) -> Proposal:
        start = seq.tokens.num_generated + len(seq.tokens.forced)
        right = self._answer(seq)[start:][: self._draw.randrange(limit + 1)]
        is_wrong = [self._draw.randrange(self._wrong_in) == 0 for _ in right]
        return Proposal(
            [self._draw.randrange(self._vocab) if w else t for w, t in zip(is_wrong, right, strict=True)], 2
        )

    def foresees(self, seq: Sequence) -> int:
        return 2 * self._draw.randrange(2)

    def ended(self, seq: Sequence) -> None:
        """It learns nothing."""
