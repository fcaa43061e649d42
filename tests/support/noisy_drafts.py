"""Proposers that are wrong as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from support.fake_engine import VOCAB, FakeRunner, slot_of

from common.base.errors import EngineError
from common.engine.drafting import Proposer
from common.engine.sequence import Sequence
from common.engine.speculation.token_index import Proposal
from common.engine.step import SampledToken, StepInput, StepOutput


class NoisyDrafts(Proposer):
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


class ErringDraft(FakeRunner):
    """A draft model without tensors that finds the target's token, except for one in `wrong_in` tokens; 0: always."""

    def __init__(self, num_blocks: int, seed: int, wrong_in: int) -> None:
        super().__init__(num_blocks)
        self._draw = random.Random(seed)
        self._wrong_in = wrong_in
        self.contexts: set[tuple[int, ...]] = set()
        """The tokens that each draw saw."""

    def execute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        output = super().execute(step, on_layer)
        for spec in step.samples:
            slot = self.slots[slot_of(step.block_tables[0][spec.seq_index], spec.position - 1)]
            assert slot is not None
            self.contexts.add(slot[2])
        for index, token in enumerate(output.sampled):
            if self._wrong_in and self._draw.randrange(self._wrong_in) == 0:
                output.sampled[index] = SampledToken((token.token_id + 1) % VOCAB)
        return output


class ErringHead(FakeRunner):
    """The model's own slots, in which a draft head writes too: it finds the model's token, except for one in `wrong_in`; 0: always.
    Every `fails_in`-th of its steps fails."""

    def __init__(self, num_blocks: int, seed: int, wrong_in: int, fails_in: int) -> None:
        super().__init__(num_blocks)
        self._draw = random.Random(seed)
        self._wrong_in = wrong_in
        self._fails_in = fails_in
        self.guessed = 0

    def execute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        output = super().execute(step, on_layer)
        if step.by_head:
            self.guessed += 1
            assert step.query_lens == [1] * len(step.positions)
            if self.guessed % self._fails_in == 0:
                raise EngineError("the head failed")
            for index, token in enumerate(output.sampled):
                if self._wrong_in and self._draw.randrange(self._wrong_in) == 0:
                    output.sampled[index] = SampledToken((token.token_id + 1) % VOCAB)
        return output
