"""Sequences under grammars beside others: the same answers whatever is in flight, drafted, preempted or recomputed."""

from __future__ import annotations

import functools
import random
from collections import deque
from typing import Any

import pytest
from support.fake_engine import VOCAB, FakeRunner, generate
from support.grammars import EOS, SCHEMA, constrained, fake_tokenizer, json_grammar
from support.noisy_drafts import NoisyDrafts

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, Grammar, SamplingParams
from common.engine.drafting import Drafting
from common.engine.grammar.compile import compile_grammar
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.sequence_tokens import SequenceTokens
from common.engine.step import StepOutput
from common.kv.pool import BlockPool

MAX_MODEL_LEN = 200
KINDS: list[dict[str, Any]] = [
    {"grammar": json_grammar()},
    {"grammar": json_grammar({"type": "array", "items": SCHEMA, "minItems": 2, "maxItems": 2}), "min_tokens": 300},
    {"grammar": Grammar("start: /[ab]{3,40}/"), "stop_token_ids": []},
    {"grammar": Grammar('start: "one fixed answer that is longer than a step of eight rows"')},
    {},
]


def requests() -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(3)
    made = []
    for number in range(15):
        prompt = [draw.randrange(VOCAB_OF_PROMPTS) for _ in range(draw.randrange(1, 40))]
        kind = {"stop_token_ids": [EOS], "max_tokens": draw.choice([7, 30, 150]), **KINDS[number % len(KINDS)]}
        made.append((prompt, SamplingParams(seed=0, temperature=0.0, **kind)))
    return made


VOCAB_OF_PROMPTS = 500


@functools.cache
def expected() -> dict[int, list[int]]:
    return {
        number: constrained(prompt, params)
        if params.grammar is not None
        else generate(prompt, params.max_tokens, params.stop_token_ids)
        for number, (prompt, params) in enumerate(requests())
    }


def run(scheduler: Scheduler, runner: FakeRunner, depth: int) -> dict[int, list[int]]:
    """All requests to their end, with `depth` steps in flight in each group; outputs arrive as late as possible."""
    answers: dict[int, list[int]] = {}
    for number, (prompt, params) in enumerate(requests()):
        seq = Sequence(
            AttemptKey(str(number), 1), EngineRequest(pack_ids(prompt), params), list(prompt), root_hash("f"), 0.0
        )
        if params.grammar is not None:
            seq.tokens.set_grammar(compile_grammar(fake_tokenizer(), params.grammar.source), [EOS])
        scheduler.add(seq)
    flying: deque[tuple[ScheduledStep, StepOutput]] = deque()
    while True:
        scheduled = scheduler.schedule()
        if scheduled is not None:
            assert len(scheduled.step.token_ids) <= scheduler.config.max_num_batched_tokens + 1
            flying.append((scheduled, runner.execute(scheduled.step)))
        elif not flying:
            break
        if scheduled is None or len(flying) == depth * scheduler.config.num_microbatches:
            landing, output = flying.popleft()
            for done in scheduler.update(landing, output.sampled):
                assert done.error is None, done.error
                answers.setdefault(int(done.seq.key.request_id), []).extend(token.token_id for token in done.tokens)
            scheduler.check_integrity()
    assert scheduler.pool.num_used == 0
    return answers


@pytest.mark.parametrize("blocks", [60, 18])
@pytest.mark.parametrize(("groups", "depth"), [(1, 1), (1, 2), (2, 1)])
def test_answers_are_those_of_a_run_token_by_token(groups: int, depth: int, blocks: int) -> None:
    config = SchedulerConfig(MAX_MODEL_LEN, 6, 24, 8, num_microbatches=groups, depth=depth)
    scheduler, runner = Scheduler(config, BlockPool(blocks)), FakeRunner(blocks)
    assert run(scheduler, runner, depth) == expected()
    assert bool(scheduler.num_preemptions) == (blocks == 18)


def test_forced_tokens_are_computed_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SchedulerConfig(MAX_MODEL_LEN, 6, 24, 8)
    together, apart = FakeRunner(60), FakeRunner(60)
    answers = run(Scheduler(config, BlockPool(60)), together, 1)
    monkeypatch.setattr(SequenceTokens, "draft", lambda *_: None)
    assert run(Scheduler(config, BlockPool(60)), apart, 1) == answers
    assert together.steps < apart.steps


@pytest.mark.parametrize("blocks", [60, 18])
@pytest.mark.parametrize(("groups", "depth"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("wrong_in", [2, 8])
def test_guessed_tokens_behind_forced_ones_change_no_answer(
    wrong_in: int, groups: int, depth: int, blocks: int
) -> None:
    """Each draft's row has the mask that follows the drafts before it."""
    config = SchedulerConfig(MAX_MODEL_LEN, 6, 40, 24, num_microbatches=groups, depth=depth)
    proposer = NoisyDrafts(wrong_in, wrong_in, VOCAB, lambda seq: expected()[int(seq.key.request_id)])
    scheduler = Scheduler(config, BlockPool(blocks), drafting=Drafting(proposer, 6, always=True))
    assert run(scheduler, FakeRunner(blocks), depth) == expected()
    guessed = scheduler.drafting.counts["noisy"]
    assert guessed.accepted > 20
    assert guessed.drafted > guessed.accepted or wrong_in > 2, (
        "the masks refuse most wrong guesses before a row is computed"
    )
    forced = scheduler.drafting.counts["grammar"]
    assert forced.accepted >= forced.drafted - 15, "only those after an answer's end are not accepted"
