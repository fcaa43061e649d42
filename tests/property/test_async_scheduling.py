"""Random workloads with the next step prepared while one runs, or with drafts, against one token at a time: the same answers."""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from support.fake_engine import VOCAB, FakeRunner, generate, scored_prompt, wasted_rows
from support.noisy_drafts import ErringDraft, ErringHead, NoisyDrafts

from common.base.hashing import hash_blocks, root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, PromptLogprobs, SamplingParams
from common.engine.draft_head import DraftHeadProposer
from common.engine.draft_model import DraftModel
from common.engine.drafting import Drafting
from common.engine.kv_allocator import KVAllocator
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.kv.pool import BlockPool

MAX_MODEL_LEN = 120


@dataclass
class Outcome:
    """What one run of a workload brought."""

    answers: dict[AttemptKey, tuple[list[int], str | None]] = field(default_factory=dict)
    scored: dict[AttemptKey, list[PromptLogprobs]] = field(default_factory=dict)
    aborted: set[AttemptKey] = field(default_factory=set)
    stops: int = 0
    preemptions: int = 0
    wasted: int = 0
    placeholders: int = 0
    rows_of_aborted: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Outcome) -> None:
        self.stops += other.stops
        self.preemptions += other.preemptions
        self.wasted += other.wasted
        self.placeholders += other.placeholders
        self.rows_of_aborted += other.rows_of_aborted
        self.drafted += other.drafted
        self.accepted += other.accepted


def workload(seed: int) -> list[tuple[int, list[int], SamplingParams, int | None]]:
    """(round of arrival, prompt, parameters, round of its abort if any)"""
    draw = random.Random(seed)
    requests = []
    for _ in range(draw.randrange(4, 16)):
        shared = list(range(draw.choice([0, 0, 18, 40])))
        prompt = shared + [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 20))]
        stops = draw.choice([[], [], list(range(0, VOCAB, 30))])
        params = SamplingParams(
            seed=1,
            max_tokens=draw.randrange(1, 70),
            temperature=0.0,
            stop_token_ids=stops,
            min_tokens=draw.choice([0, 0, 25]),
            prompt_logprobs=draw.choice([None, None, 1]),
        )
        at = draw.randrange(60)
        requests.append((at, prompt, params, at + draw.randrange(50) if draw.random() < 0.2 else None))
    return requests


def blocks_of(seed: int) -> int:
    """Blocks of a pool that is too small for the workload's answers."""
    return random.Random(seed + 1000).randrange(9, 16)


def run(
    seed: int,
    depth: int,
    num_microbatches: int = 1,
    drafting: Drafting | None = None,
    runner: FakeRunner | None = None,
    allocators: list[KVAllocator] | None = None,
) -> Outcome:
    """One workload to its end, in a pool that is too small for its answers. `allocators` gets the scheduler's."""
    draw = random.Random(seed + 1000)
    blocks = draw.randrange(9, 16)
    config = SchedulerConfig(
        MAX_MODEL_LEN, draw.randrange(2, 7), draw.choice([8, 64]), draw.choice([4, 32]), num_microbatches, depth
    )
    scheduler, out = Scheduler(config, BlockPool(blocks), drafting=drafting), Outcome()
    runner = runner or FakeRunner(blocks)
    if allocators is not None:
        allocators.append(scheduler.allocator)
    requests = [
        (
            at,
            abort_at,
            Sequence(
                AttemptKey(f"r{n}", 1), EngineRequest(pack_ids(prompt), params), list(prompt), root_hash("fake"), 0.0
            ),
        )
        for n, (at, prompt, params, abort_at) in enumerate(workload(seed))
    ]
    flying: deque[ScheduledStep] = deque()
    for round_ in range(5000):
        for at, abort_at, seq in requests:
            if at == round_:
                scheduler.add(seq)
            if abort_at == round_ and seq.key not in out.answers:
                out.aborted.add(seq.key)
                out.rows_of_aborted += seq.progress.num_scheduled - seq.progress.num_computed
                scheduler.end(seq, "aborted")
        scheduled = scheduler.schedule()
        if scheduled is not None:
            flying.append(scheduled)
            out.placeholders += len(scheduled.step.placeholders)
        if flying and (scheduled is None or len(flying) == depth * num_microbatches):
            # At the last moment, so that a block given away too early is overwritten by its former owner.
            landing = flying.popleft()
            output = runner.execute(landing.step)
            out.wasted += wasted_rows(landing)
            for done in scheduler.update(landing, output.sampled, output.prompt_logprobs):
                seq = done.seq
                out.scored.setdefault(seq.key, []).extend(done.prompt_logprobs)
                assert not done.tokens or not seq.scores_prompt, "a token came before the prompt's log-probabilities"
                if done.finish_reason is not None:
                    out.answers[seq.key] = seq.tokens.ids[seq.tokens.prompt_len :], done.finish_reason
                    out.stops += done.finish_reason == "stop"
        scheduler.check_integrity()
        if round_ > 120 and not flying and scheduler.is_idle():
            break
    assert scheduler.is_idle(), "a sequence never finished"
    assert scheduler.pool.num_used == 0
    check_cache(scheduler.pool, runner)
    out.preemptions = scheduler.num_preemptions
    for counts in scheduler.drafting.counts.values():
        out.drafted += counts.drafted
        out.accepted += counts.accepted
    return out


def check_cache(pool: BlockPool, runner: FakeRunner) -> None:
    """Each hash in the prefix cache promises the KV that is in its block."""
    for block_hash, block in pool._by_hash[0][0].items():
        slot = runner.slots[(block + 1) * 16 - 1]
        assert slot is not None
        assert hash_blocks(root_hash("fake"), list(slot[2]))[-1] == block_hash, "a hash that promises other KV"


@functools.cache
def answer_of(seq: Sequence) -> list[int]:
    params = seq.request.sampling
    return generate(seq.request.prompt_ids, params.max_tokens, params.stop_token_ids, params.min_tokens)


def check(out: Outcome, seed: int) -> None:
    for n, (_, prompt, params, _) in enumerate(workload(seed)):
        key = AttemptKey(f"r{n}", 1)
        expected = generate(prompt, params.max_tokens, params.stop_token_ids, params.min_tokens)
        expected = expected[: MAX_MODEL_LEN - len(prompt)]
        reason = "stop" if expected[-1] in params.stop_token_ids else "length"
        assert key in out.aborted or out.answers[key] == (expected, reason), (seed, key)
        scores = scored_prompt(prompt) if params.prompt_logprobs else []
        assert key in out.aborted or out.scored[key] == scores, "each position once, preempted or not"


@pytest.mark.parametrize(("num_microbatches", "depth"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_answer_is_that_of_an_undisturbed_run(num_microbatches: int, depth: int) -> None:
    total = Outcome()
    for seed in range(25):
        out = run(seed, depth, num_microbatches)
        check(out, seed)
        assert out.wasted <= (depth - 1) * out.stops + out.rows_of_aborted, "more than one row of one that ended"
        total.add(out)
    assert total.preemptions > 10, "the pool is not too small"
    assert (total.placeholders > 500) == (depth == 2)
    assert (total.wasted > total.rows_of_aborted + 10) == (depth == 2)


@pytest.mark.parametrize(("num_microbatches", "depth"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("wrong_in", [2, 9])
def test_drafts_change_no_answer_however_many_are_wrong(wrong_in: int, num_microbatches: int, depth: int) -> None:
    total = Outcome()
    for seed in range(15):
        drafting = Drafting(NoisyDrafts(seed, wrong_in, VOCAB, answer_of), 6, always=True)
        out = run(seed, depth, num_microbatches, drafting)
        check(out, seed)
        total.add(out)
    assert total.preemptions > 1, "the pool is not too small"
    assert total.drafted - total.accepted > 100
    assert total.accepted > 100


def texts_of(seed: int) -> list[list[int]]:
    """Each prompt of a workload with its answer."""
    return [
        prompt + generate(prompt, params.max_tokens, params.stop_token_ids, params.min_tokens)
        for _, prompt, params, _ in workload(seed)
    ]


@pytest.mark.parametrize(("num_microbatches", "depth"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("wrong_in", [0, 3])
def test_a_draft_model_changes_no_answer_and_reads_and_publishes_only_what_is_right(
    wrong_in: int, num_microbatches: int, depth: int
) -> None:
    """Preempted and aborted sequences, prefix hits and chunks; its pool is too small too. The fake model checks every slot it reads."""
    total = Outcome()
    for seed in range(8):
        model = ErringDraft(12, seed, wrong_in)
        draft = DraftModel(model, 12, max_model_len=MAX_MODEL_LEN - 10, prompt_chunk=16)
        out = run(seed, depth, num_microbatches, Drafting(draft, 6, always=True))
        check(out, seed)
        total.add(out)
        draft.blocks.check_integrity()
        draft.blocks.release_ended()
        assert draft.blocks.pool.num_used == 0
        known = {tuple(whole[:end]) for whole in texts_of(seed) for end in range(len(whole) + 1)}
        late = [context for context in model.contexts if context[:-5] not in known]
        assert not late, "a draw sees at most 5 guesses, those of its own step"
        check_cache(draft.blocks.pool, model)
    assert total.accepted > 100
    assert (total.accepted == total.drafted) == (wrong_in == 0)


@pytest.mark.parametrize(("wrong_in", "fails_in"), [(0, 10**9), (3, 10**9), (3, 5)])
def test_a_draft_head_changes_no_answer_and_what_it_writes_is_in_no_cached_block(wrong_in: int, fails_in: int) -> None:
    """It writes guesses into the model's own blocks, and fails now and then. The fake model checks every slot that it reads."""
    total = Outcome()
    for seed in range(15):
        runner = ErringHead(blocks_of(seed), seed, wrong_in, fails_in)
        allocators: list[KVAllocator] = []
        head = DraftHeadProposer("mtp", runner.execute, lambda seq, slots, own=allocators: own[0].reach(seq, slots))
        out = run(seed, 1, 1, Drafting(head, 6, always=True), runner, allocators)
        check(out, seed)
        total.add(out)
    assert total.preemptions > 0, "the pool is not too small"
    assert total.accepted > 100
    assert (total.accepted == total.drafted) == (wrong_in == 0)
