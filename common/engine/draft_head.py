"""Guesses tokens with a head that belongs to the model. Runs on the leader's engine thread, between steps.

The head's KV is among the model's (`common.model.draft_head_description`): every step of the model writes it for its rows. A
guess is a step of the head with one row for each sequence, at the position of its last token; a further one is a step at the
next position, with the guess as its token. What these steps write lies where the model's next step writes anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from common.base.errors import EngineError
from common.base.hashing import BLOCK_SIZE
from common.engine.guesses import Guesses, ModelProposer, proposals
from common.engine.sequence import Sequence
from common.engine.speculation.token_index import Proposal
from common.engine.step import StepInput, StepOutput

log = logging.getLogger(__name__)

_COST_BEFORE_S = 1e-6
"""Assumed seconds of a step before one was measured."""
_WARM_UP = 2
"""First steps, which are not measured: they pay for the first access to weights."""
_MOST_FORCED = 8
"""A sequence whose grammar forces more tokens gets no guesses: the head would need a step for each of them."""

Run = Callable[[StepInput], StepOutput]
"""Runs a step on all ranks and waits for it. Raises: EngineError, RankLost."""


class DraftHeadProposer(ModelProposer):
    """Proposes what the head draws."""

    def __init__(self, name: str, run: Run, reach: Callable[[Sequence, int], int]) -> None:
        """name: the method's. `reach`: makes room for the rows of guesses (`KVAllocator.reach`)."""
        super().__init__()
        self.name = name
        self._run = run
        self._reach = reach
        self._warm_up = _WARM_UP

    def cost_s(self, num_seqs: int) -> float:
        return super().cost_s(num_seqs) if self.costs.is_measured else _COST_BEFORE_S

    def propose(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[Proposal]:
        started = time.perf_counter()
        guesses = [self._begin(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        active = [guess for guess in guesses if guess is not None]
        number = 0
        try:
            while active:
                active = self._step(active, number)
                number += 1
        except EngineError as error:  # no request may fail because of its drafts
            log.error("the draft head failed, so that this step has fewer drafts", exc_info=error)
        self.spent_s = time.perf_counter() - started
        return proposals(guesses)

    def _begin(self, seq: Sequence, limit: int) -> Guesses | None:
        """None if the sequence gets no guesses."""
        last, forced = seq.num_tokens - 1, seq.tokens.num_forced
        if limit <= 0 or forced > _MOST_FORCED:
            return None
        slots = self._reach(seq, last + forced + limit)
        limit = min(limit, slots - last - forced)
        return Guesses(seq, limit) if limit > 0 else None

    def _step(self, guesses: list[Guesses], number: int) -> list[Guesses]:
        """Compute the `number`-th row after the last known token's of each. Returns those that need another one."""
        started = time.perf_counter()
        drawing = [guess for guess in guesses if number >= guess.seq.tokens.num_forced]
        drawn = self._run(head_step(guesses, number)).sampled
        going = [guess for guess in guesses if number < guess.seq.tokens.num_forced]
        going += [guess for guess, token in zip(drawing, drawn, strict=True) if guess.take(token)]
        if self._warm_up:
            self._warm_up -= 1
        else:
            self.costs.record(len(guesses), time.perf_counter() - started)
        return going


def head_step(guesses: Seq[Guesses], number: int) -> StepInput:
    """A step of the head with the row `number` after the last known token's of each sequence. Those whose next token is not
    forced draw a guess."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tables: list[list[int]] = []
    for guess in guesses:
        seq = guess.seq
        position = seq.num_tokens - 1 + number
        table = seq.blocks.tables[0]
        token_ids.append(seq.tokens.draft_ids[number - 1] if number else seq.tokens.ids[-1])
        positions.append(position)
        slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        tables.append(list(table))
    return StepInput(
        step_id=0,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=[slots],
        query_lens=[1] * len(guesses),
        context_lens=[position + 1 for position in positions],
        block_tables=[tables],
        num_decode_seqs=len(guesses),
        samples=[each.draw(row, row) for row, each in enumerate(guesses) if number >= each.seq.tokens.num_forced],
        by_head=True,
    )
