"""Steps in which a sequence has several rows and several draws, against steps of one row and one draw."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import VOCAB, FakeRunner, generate
from support.oracle import make_tiny
from support.tiny_engine import answers

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.sampling.base import Sampler
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.sampling.host_sampler import HostSampler
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.seen_tokens import TokenCounter
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.kv.pool import BlockPool

PROMPT = list(range(20))


def sequence(name: str = "a", **params: Any) -> Sequence:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 30, "temperature": 0.0, **params})
    return Sequence(AttemptKey(name, 1), EngineRequest(pack_ids(PROMPT), sampling), list(PROMPT), root_hash("f"), 0.0)


def start(scheduler: Scheduler) -> ScheduledStep:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled


def decoding(*seqs: Sequence, depth: int = 1, blocks: int = 64) -> Scheduler:
    """A scheduler whose sequences have drawn their first token."""
    scheduler = Scheduler(SchedulerConfig(1000, 8, 256, 256, depth=depth), BlockPool(blocks))
    for seq in seqs:
        scheduler.add(seq)
    scheduled = start(scheduler)
    scheduler.update(scheduled, [SampledToken(7) for _ in scheduled.step.samples])
    return scheduler


def test_drafts_add_rows_that_each_draw_the_token_after_them() -> None:
    drafting, plain = sequence("a", frequency_penalty=1.0), sequence("b")
    scheduler = decoding(drafting, plain)
    drafting.tokens.draft_ids = [8, 8]
    step = start(scheduler).step
    assert (step.query_lens, step.num_decode_seqs, step.context_lens) == ([3, 1], 2, [23, 21])
    assert (step.token_ids, step.positions) == ([7, 8, 8, 7], [20, 21, 22, 20])
    assert [(s.seq_index, s.row, s.position, s.num_generated) for s in step.samples] == [
        (0, 0, 21, 1),
        (0, 1, 22, 2),
        (0, 2, 23, 3),
        (1, 3, 21, 1),
    ]
    counter = TokenCounter(PROMPT, drafting.request.sampling)
    for spec, token in zip(step.samples, (7, 8, 8), strict=False):
        counter.add([token])
        assert spec.seen == counter.seen(), "each draw counts the drafts before it"


def test_all_tokens_of_a_step_are_entered_and_those_after_the_end_are_not() -> None:
    seq, stopping = sequence("a"), sequence("b", stop_token_ids=[9])
    scheduler = decoding(seq, stopping)
    seq.tokens.draft_ids, stopping.tokens.draft_ids = [5, 6], [9, 6]
    tokens = [SampledToken(token) for token in (5, 6, 4, 9, 6, 4)]
    done = scheduler.update(start(scheduler), tokens)
    assert [[token.token_id for token in each.tokens] for each in done] == [[5, 6, 4], [9]]
    assert [each.finish_reason for each in done] == [None, "stop"]
    assert (seq.tokens.ids[20:], seq.progress.num_computed, seq.tokens.draft_ids) == ([7, 5, 6, 4], 23, [])
    assert stopping.tokens.ids[20:] == [7, 9]
    scheduler.check_integrity()


def test_a_token_that_could_not_be_drawn_enters_nothing() -> None:
    seq = sequence()
    scheduler = decoding(seq)
    seq.tokens.draft_ids = [5]
    (done,) = scheduler.update(start(scheduler), [SampledToken(-1, error="nan"), SampledToken(5)])
    assert (done.tokens, str(done.error)) == ([], "nan")


def test_drafts_get_the_blocks_for_all_their_rows_and_wait_for_pending_tokens() -> None:
    seq = sequence()
    scheduler = decoding(seq, depth=2)
    pending = start(scheduler)
    seq.tokens.draft_ids = list(range(30))
    assert scheduler.schedule() is None
    scheduler.update(pending, [SampledToken(3)])
    assert not seq.tokens.draft_ids, "they followed another token"
    seq.tokens.draft_ids = list(range(28))
    step = start(scheduler).step
    assert len(step.token_ids) == 29
    assert seq.blocks.num_slots == 4 * 16
    scheduler.check_integrity()


def test_a_prompt_chunk_of_one_row_is_no_decode_row() -> None:
    scheduler = Scheduler(SchedulerConfig(1000, 8, 256, 1), BlockPool(64))
    decode, prompt = sequence("a"), sequence("b")
    prompt.tokens.ids[0] = 99
    scheduler.add(decode)
    scheduler.update(start(scheduler), [SampledToken(7)])
    scheduler.add(prompt)
    step = start(scheduler).step
    assert (step.query_lens, step.num_decode_seqs, len(step.samples)) == ([1, 1], 1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_known_tokens_as_drafts_give_the_tokens_of_plain_decoding(seed: int) -> None:
    """The fake model checks every slot that a step reads."""
    draw = random.Random(seed)
    blocks = draw.randrange(14, 20)
    scheduler, runner = Scheduler(SchedulerConfig(120, 4, 64, 16), BlockPool(blocks)), FakeRunner(blocks)
    seqs: list[Sequence] = []
    for n in range(6):
        prompt = [n, *(draw.randrange(VOCAB) for _ in range(draw.randrange(30)))]
        sampling = SamplingParams(seed=1, max_tokens=draw.randrange(1, 60), temperature=0.0)
        seqs.append(
            Sequence(
                AttemptKey(f"r{n}", 1), EngineRequest(pack_ids(prompt), sampling), list(prompt), root_hash("f"), 0.0
            )
        )
        scheduler.add(seqs[-1])
    want = {seq.key: generate(seq.request.prompt_ids, seq.request.sampling.max_tokens) for seq in seqs}
    most_draws = 0
    while (scheduled := scheduler.schedule()) is not None:
        most_draws = max(most_draws, *Counter(spec.seq_index for spec in scheduled.step.samples).values(), 0)
        scheduler.update(scheduled, runner.execute(scheduled.step).sampled)
        scheduler.check_integrity()
        for seq in scheduler.running.values():
            seq.tokens.draft_ids = want[seq.key][seq.tokens.num_generated : -1][: draw.randrange(5)]
    assert {seq.key: seq.tokens.ids[seq.tokens.prompt_len :] for seq in seqs} == want
    assert scheduler.pool.num_used == 0
    assert most_draws > 2


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.mark.parametrize("sampler", [HostSampler(), DeviceSampler()], ids=["host", "device"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_real_model_verifies_drafts_with_the_tokens_of_plain_decoding(
    model_path: Path, sampler: Sampler, depth: int
) -> None:
    plain, one_by_one = answers(model_path, depth)
    draw = random.Random(depth)

    def propose(seq: Sequence) -> list[int]:
        known = [token.token_id for token in plain[seq.key]]
        return known[seq.tokens.num_generated : -1][: draw.randrange(4)]

    drafted, several = answers(model_path, depth, sampler, propose)
    assert several.num_preemptions > 0, "the pool is not too small"
    assert several._steps < one_by_one._steps, "hardly any step drew several tokens"  # pyright: ignore
    for key, tokens in plain.items():
        assert [t.token_id for t in drafted[key]] == [t.token_id for t in tokens], key
        for ours, theirs in zip(drafted[key], tokens, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None and theirs.logprobs is not None:
                assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
