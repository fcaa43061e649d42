"""Guesses tokens with a draft model: a small model with the same vocabulary. Runs on the leader's engine thread, between steps.

It draws with the target's keys (seed, position) and rules, so that a guess is right wherever the two models would draw the same
token. Each further guess is a step of the draft model with one row for each sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.base.errors import EngineError
from common.base.hashing import BLOCK_SIZE
from common.engine.draft_kv import DraftBlocks
from common.engine.guesses import ANY_DRAW, Guesses, ModelProposer, proposals
from common.engine.runner import ModelRunner
from common.engine.sequence import Sequence
from common.engine.speculation.sequence_drafts import DraftKV
from common.engine.speculation.step_costs import StepCosts
from common.engine.speculation.token_index import Proposal
from common.engine.step import SampleSpec, StepInput
from common.kv.pool import BlockPool

log = logging.getLogger(__name__)

_FEW = 4
"""Known tokens that are computed together with the first guess; more of them are a chunk of a prompt."""
_TOKENS_FOR_ONE = 32
"""A prompt is not computed if it has more than this number of tokens for each token that the answer may still get: it would take
longer than its drafts save."""
_WARM_UP = 3


@dataclass
class _Guess(Guesses):
    """A sequence that gets guesses now."""

    kv: DraftKV = field(kw_only=True)


class DraftModel(ModelProposer):
    """Proposes what the draft model draws."""

    name = "draft"

    def __init__(self, runner: ModelRunner, num_blocks: int, *, max_model_len: int, prompt_chunk: int) -> None:
        """`num_blocks`: of the runner's KV memory. `max_model_len`: that of the draft model, if it is shorter than the target's.
        `prompt_chunk`: prompt tokens that it computes for one step of the target."""
        super().__init__()
        self._runner = runner
        self._max_model_len = max_model_len
        self._prompt_chunk = prompt_chunk
        self.blocks = DraftBlocks(BlockPool(num_blocks))
        for _ in range(_WARM_UP):
            started = time.perf_counter()
            runner.execute(_one_row())
            self.costs = StepCosts()  # the first ones pay for the first access to weights
            self.costs.record(1, time.perf_counter() - started)

    def ended(self, seq: Sequence) -> None:
        if seq.drafts is not None and seq.drafts.kv is not None:
            self.blocks.release(seq)

    def propose(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[Proposal]:
        started = time.perf_counter()
        self.blocks.release_ended()
        guesses = [self._begin(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        begun = [guess for guess in guesses if guess is not None]
        try:
            active = self._compute_prompts(begun)
            while active:
                active = self._guess(active)
        except EngineError as error:  # no request may fail because of its drafts
            log.error("the draft model failed, so that this step has no drafts", exc_info=error)
            for guess in begun:
                self.blocks.release(guess.seq)
                guess.ahead = []
        self.spent_s = time.perf_counter() - started
        return proposals(guesses)

    def _begin(self, seq: Sequence, limit: int) -> _Guess | None:
        """None if the sequence gets no guesses."""
        tokens = seq.tokens
        known = seq.num_tokens + tokens.num_forced
        limit = min(limit, self._max_model_len - known)
        if limit <= 0:
            return None
        if seq.drafts is not None and seq.drafts.kv is None:
            left = tokens.sampling.max_tokens - tokens.num_generated
            if seq.num_tokens > _TOKENS_FOR_ONE * left:
                return None
        kv = self.blocks.hold(seq, known + limit - 1)
        return None if kv is None else _Guess(seq, limit, kv=kv)

    def _compute_prompts(self, guesses: list[_Guess]) -> list[_Guess]:
        """Compute the next chunk of known tokens. Returns the sequences with at most `_FEW` known tokens left."""
        chunks: list[tuple[_Guess, int]] = []
        budget = self._prompt_chunk
        for guess in guesses:
            lacking = guess.seq.num_tokens - 1 - guess.kv.num_computed
            if lacking > _FEW and budget > 0:
                chunks.append((guess, min(lacking, budget)))
                budget -= chunks[-1][1]
        if chunks:
            self._runner.execute(_step(chunks, []))
            for guess, count in chunks:
                guess.kv.num_computed += count
        return [each for each in guesses if each.seq.num_tokens - 1 - each.kv.num_computed <= _FEW]

    def _guess(self, guesses: list[_Guess]) -> list[_Guess]:
        """Guess one more token for each. Returns those that get another one."""
        started = time.perf_counter()
        rows: list[tuple[_Guess, int]] = []
        samples: list[SampleSpec] = []
        for index, guess in enumerate(guesses):
            end = guess.seq.num_tokens + len(guess.seq.tokens.draft_ids)
            count = end - guess.kv.num_computed
            first = guess.kv.num_computed + 1
            samples += [SampleSpec(index, len(samples) + i, ANY_DRAW, first + i, 0) for i in range(count - 1)]
            samples.append(guess.draw(index, len(samples)))
            rows.append((guess, count))
        drawn = self._runner.execute(_step(rows, samples)).sampled
        last, going = -1, list[_Guess]()
        for guess, count in rows:
            last += count
            _computed(guess, count)
            if guess.take(drawn[last]):
                going.append(guess)
        self.costs.record(len(guesses), time.perf_counter() - started)
        return going


def _computed(guess: _Guess, count: int) -> None:
    kv, known = guess.kv, guess.seq.num_tokens
    first = max(kv.num_computed, known)
    kv.num_computed += count
    kv.guessed += guess.seq.tokens.draft_ids[first - known : kv.num_computed - known]


def _step(rows: list[tuple[_Guess, int]], samples: list[SampleSpec]) -> StepInput:
    """The next rows of each sequence. Without `samples` they are chunks of prompts."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for guess, count in rows:
        tokens, start = guess.seq.tokens, guess.kv.num_computed
        stop, known = start + count, guess.seq.num_tokens
        token_ids += tokens.ids[start:stop]
        token_ids += tokens.draft_ids[max(0, start - known) : max(0, stop - known)]
        positions += range(start, stop)
        slots += [guess.kv.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)]
    return StepInput(
        step_id=0,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=[slots],
        query_lens=[count for _, count in rows],
        context_lens=[guess.kv.num_computed + count for guess, count in rows],
        block_tables=[[list(guess.kv.blocks) for guess, _ in rows]],
        num_decode_seqs=len(rows) if samples else 0,
        samples=samples,
    )


def _one_row() -> StepInput:
    return StepInput(0, [0], [0], [[0]], [1], [1], [[[0]]], 1, [SampleSpec(0, 0, ANY_DRAW, 1, 0)])
