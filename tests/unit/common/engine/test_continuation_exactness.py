"""A request that another attempt continues, at whichever token, has the tokens of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.oracle import TINY, make_tiny

from common.attention.cpu import CpuAttention
from common.attention.grouped import attention_of_groups
from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams, TokenLogprobs
from common.engine.runner import ModelRunner
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.kv.pool import BlockPool
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.model.config import load_model_config
from common.model.kv_spec import kv_spec
from common.model.loader import load_model

NUM_BLOCKS = 200
PROMPT = [(37 * i) % 90 + 3 for i in range(21)]
LENGTH = 40
CASES = {
    "sampled with every penalty": SamplingParams(
        seed=11,
        max_tokens=LENGTH,
        temperature=0.9,
        top_p=0.95,
        top_k=60,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias=[(5, 1.5), (6, -3.0)],
        min_tokens=12,
        stop_token_ids=[4, 9, 17],
        logprobs=3,
    ),
    "greedy with penalties": SamplingParams(
        seed=0, max_tokens=LENGTH, temperature=0.0, frequency_penalty=0.8, repetition_penalty=1.4, logprobs=1
    ),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path: Path = make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3")
    config = load_model_config(path)
    layout = KVLayout("f", kv_spec(config, "float32"))
    storage = KVStorage(layout, layout.shard(0, 0), NUM_BLOCKS)
    model = load_model(path, config, dtype="float32", load_format="auto", seed=0, small_batches=True)
    return ModelRunner(model, storage, attention_of_groups(storage, model.attention_shapes(16), CpuAttention))


def run(runner: ModelRunner, sampling: SamplingParams, known: list[int]) -> tuple[list[int], list[TokenLogprobs], str]:
    """An attempt that continues after `known`, on a pool that holds nothing yet."""
    scheduler = Scheduler(SchedulerConfig(512, 8, 64, 16), BlockPool(NUM_BLOCKS))
    key = AttemptKey("r", 1)
    seq = Sequence(key, EngineRequest(pack_ids(PROMPT), sampling), PROMPT + known, root_hash("f"), 0.0)
    scheduler.add(seq)
    logprobs: list[TokenLogprobs] = []
    while (scheduled := scheduler.schedule()) is not None:
        for done in scheduler.update(scheduled, runner.execute(scheduled.step).sampled):
            logprobs += [token.logprobs for token in done.tokens if token.logprobs is not None]
            if done.finish_reason is not None:
                return seq.tokens.ids[len(PROMPT) :], logprobs, done.finish_reason
    raise AssertionError("it never finished")


@pytest.mark.parametrize("case", CASES)
def test_continued_at_every_token_it_generates_the_same(runner: ModelRunner, case: str) -> None:
    sampling = CASES[case]
    assert max(PROMPT) < TINY["qwen3"].vocab_size
    tokens, logprobs, reason = run(runner, sampling, [])
    assert len(tokens) > sampling.min_tokens
    assert len(tokens) > 10, "too short to show anything"
    for index in range(1, len(tokens)):
        again, later, same_reason = run(runner, sampling, tokens[:index])
        assert (again, same_reason) == (tokens, reason), f"continued after {index}"
        assert [each.logprob for each in later] == pytest.approx([each.logprob for each in logprobs[index:]], abs=1e-4)
        assert [each.top_ids for each in later] == [each.top_ids for each in logprobs[index:]]


def test_penalties_change_what_is_generated(runner: ModelRunner) -> None:
    plain = SamplingParams(seed=0, max_tokens=LENGTH, temperature=0.0)
    without, _, _ = run(runner, plain, [])
    with_them, _, _ = run(runner, CASES["greedy with penalties"], [])
    assert with_them != without
    assert len(set(with_them)) > len(set(without)), "repetition is penalised"
