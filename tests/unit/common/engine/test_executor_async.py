"""Steps whose outputs come as events, and a model whose next step has placeholders for tokens that no host has seen."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import make_tiny

from common.attention.cpu import CpuAttention
from common.base.errors import EngineError, RankLost
from common.base.hashing import root_hash
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.executor import AsyncExecutor, LocalExecutor, StepDone, StepFailed
from common.engine.runner import LaunchedStep, ModelRunner
from common.engine.sampling.base import Sampler
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.sampling.host_sampler import HostSampler, HostSamplerOutput
from common.engine.scheduler import Plan, Scheduler, SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import SampledToken, SampleSpec, StepInput, StepOutput
from common.kv.layout import KVLayout
from common.kv.pool import BlockPool
from common.kv.storage import KVStorage
from common.model.config import load_model_config
from common.model.loader import load_model
from common.node.plan import WARM_UP

NUM_BLOCKS = 12
VOCAB = 256


class Slow:
    """A started step that is done when told."""

    def __init__(self, step_id: int, error: Exception | None = None) -> None:
        self.step_id, self.error = step_id, error
        self.done = threading.Event()

    def wait(self) -> StepOutput:
        assert self.done.wait(10)
        if self.error is not None:
            raise self.error
        return StepOutput(self.step_id, [], 0.5)


class Slowly:
    def __init__(self, *started: Slow) -> None:
        self.started = deque(started)

    def launch(self, step: StepInput, on_layer: Any = None) -> Slow:
        return self.started.popleft()


def test_outputs_and_failures_are_posted_in_the_order_of_their_start() -> None:
    events: queue.Queue[Any] = queue.Queue()
    steps = [Slow(1), Slow(2, EngineError("bad")), Slow(3)]
    local = LocalExecutor(Slowly(*steps))
    executor = AsyncExecutor(local, events.put)
    for step in steps:
        executor.submit(replace(WARM_UP, step_id=step.step_id))
    for step in reversed(steps):
        assert events.empty(), "nothing is posted before the first is done"
        step.done.set()
    first, second, third = (events.get(timeout=10) for _ in steps)
    assert isinstance(first, StepDone)
    assert first.output.step_id == 1
    assert isinstance(second, StepFailed)
    assert (second.step_id, str(second.error)) == (2, "bad")
    assert isinstance(third, StepDone)
    executor.close()
    assert local.busy_s == 1.0
    assert not any(thread.name == "outputs" for thread in threading.enumerate())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3")


def make_runner(path: Path, *, overlaps: bool, sampler: Sampler | None = None) -> ModelRunner:
    config = load_model_config(path)
    layout = KVLayout("f", config.num_layers, config.num_kv_heads, config.head_dim, "float32")
    storage = KVStorage(layout, layout.shard(0, 0), NUM_BLOCKS)
    model = load_model(path, config, dtype="float32", load_format="auto", seed=0, small_batches=True)
    return ModelRunner(
        model, storage, CpuAttention(storage, model.attention_shape(16)), sampler=sampler, overlaps=overlaps
    )


def sequences() -> list[Sequence]:
    """Every kind of sampling that looks back: penalties, banned stop tokens, log-probabilities."""
    draw = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"temperature": 1.2, "presence_penalty": 1.5, "top_k": 40},
        {"temperature": 2.0, "stop_token_ids": list(range(0, VOCAB, 5)), "min_tokens": 12},
        {"temperature": 0.0, "frequency_penalty": 2.0, "logprobs": 0},
    ]
    made = []
    for n in range(12):
        prompt = [draw.randrange(3, VOCAB - 3) for _ in range(draw.randrange(1, 30))]
        params = SamplingParams(**{"seed": n, "max_tokens": draw.randrange(40, 70), **kinds[n % len(kinds)]})
        made.append(Sequence(AttemptKey(f"r{n}", 1), EngineRequest(prompt, params), list(prompt), root_hash("f"), 0.0))
    return made


def answers(
    path: Path, depth: int, sampler: Sampler | None = None
) -> tuple[dict[AttemptKey, list[SampledToken]], Scheduler]:
    """All sequences to their ends, with `depth` steps in flight whose outputs come as late as they may."""
    scheduler = Scheduler(SchedulerConfig(128, 6, 32, 8, depth=depth), BlockPool(NUM_BLOCKS))
    runner = make_runner(path, overlaps=depth > 1, sampler=sampler)
    got: dict[AttemptKey, list[SampledToken]] = {}
    for seq in sequences():
        scheduler.add(seq)
    flying: deque[tuple[Plan, LaunchedStep]] = deque()
    while True:
        plan = scheduler.schedule()
        if plan is not None:
            flying.append((plan, runner.launch(plan.step)))
        elif not flying:
            break
        if plan is None or len(flying) == depth:
            landing, launched = flying.popleft()
            for done in scheduler.update(landing, launched.wait().sampled):
                got.setdefault(done.seq.key, []).extend(done.tokens)
    assert scheduler.is_idle()
    assert scheduler.pool.num_used == 0
    return got, scheduler


@pytest.mark.parametrize("sampler", [HostSampler(), DeviceSampler()], ids=["host", "device"])
def test_a_real_model_answers_the_same_whether_or_not_steps_are_prepared_ahead(
    model_path: Path, sampler: Sampler
) -> None:
    one, _ = answers(model_path, 1)
    two, scheduler = answers(model_path, 2, sampler)
    assert scheduler.num_preemptions > 0, "the pool is not too small"
    assert scheduler.num_wasted_rows > 0, "nothing stopped early"
    for key, tokens in one.items():
        assert [t.token_id for t in two[key]] == [t.token_id for t in tokens], key
        for ours, theirs in zip(two[key], tokens, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None and theirs.logprobs is not None:
                assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)


def test_a_step_with_placeholders_of_another_step_than_the_last_fails(model_path: Path) -> None:
    runner = make_runner(model_path, overlaps=True)
    runner.execute(WARM_UP)
    with pytest.raises(EngineError, match="placeholder tokens are of step 5"):
        runner.launch(StepInput(6, [0], [0], [16], [1], [1], [[1]], placeholder_step=5, placeholders=[(0, 0)]))


@pytest.mark.parametrize("sampler", [HostSampler(), DeviceSampler()], ids=["host", "device"])
def test_a_placeholder_for_a_token_that_was_not_drawn_costs_the_other_rows_nothing(
    model_path: Path, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a token was not drawn is known only after the next step, which has a placeholder for it, was launched."""
    runner = make_runner(model_path, overlaps=True, sampler=sampler)
    greedy = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    samples = [SampleSpec(seq, seq, greedy, 1, 0) for seq in (0, 1)]
    first = StepInput(1, [7, 8], [0, 0], [16, 32], [1, 1], [1, 1], [[1], [2]], 2, samples)
    second = StepInput(
        2,
        [0, 0],
        [1, 1],
        [17, 33],
        [1, 1],
        [2, 2],
        [[1], [2]],
        2,
        samples,
        placeholder_step=1,
        placeholders=[(0, 0), (1, 1)],
    )
    want = [runner.launch(step).wait().sampled[1] for step in (first, second)]
    logits = runner._model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        rows = logits(hidden)
        assert rows is not None
        rows[0] = torch.nan
        return rows

    monkeypatch.setattr(runner._model, "logits", broken)
    launched = [runner.launch(step) for step in (first, second)]
    for step, token in zip(launched, want, strict=True):
        sampled = step.wait().sampled
        assert sampled[0].error is not None
        assert sampled[1].token_id == token.token_id


def test_a_card_that_fails_ends_the_rank_and_not_only_the_step(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model_path, overlaps=True)

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(runner._attention, "plan", fail)
    with pytest.raises(RankLost, match="illegal memory access"):
        runner.launch(WARM_UP)
    with pytest.raises(RankLost, match="illegal memory access"):
        LaunchedStep(1, LostOutput(), 0.0).wait()


class LostOutput:
    """Tokens that never arrive."""

    token_ids = torch.zeros(1, dtype=torch.int64)

    def wait(self) -> list[SampledToken]:
        raise torch.AcceleratorError("an illegal memory access was encountered")


class Watched(HostSampler):
    """Remembers that the end of a step without tokens was asked for."""

    def __init__(self) -> None:
        self.ends = 0

    def empty(self, device: torch.device) -> HostSamplerOutput:
        self.ends += 1
        return super().empty(device)


def test_a_step_that_draws_nothing_is_waited_for_too(model_path: Path) -> None:
    sampler = Watched()
    runner = make_runner(model_path, overlaps=True, sampler=sampler)
    assert runner.execute(replace(WARM_UP, samples=[])).sampled == []
    assert sampler.ends == 1
    assert DeviceSampler().empty(torch.device("cpu")).wait() == []
