"""Steps whose outputs come as events, and a model whose next step has placeholders for tokens that no host has seen."""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import make_tiny
from support.tiny_engine import answers, make_runner
from torch import Tensor

from common.base.errors import EngineError, RankLost
from common.control.messages import SamplingParams
from common.engine.executor import AsyncExecutor, LocalExecutor, StepDone, StepFailed
from common.engine.runner import LaunchedStep
from common.engine.sampling.base import Sampler
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.sampling.host_sampler import HostSampler, HostSamplerOutput
from common.engine.step import SampledToken, SampleSpec, StepInput, StepOutput
from common.node.profile_run import warm_up


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
    executor = AsyncExecutor(local.start, events.put)
    for step in steps:
        executor.submit(replace(warm_up(), step_id=step.step_id))
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


@pytest.mark.parametrize("sampler", [HostSampler(), DeviceSampler()], ids=["host", "device"])
def test_a_real_model_answers_the_same_whether_or_not_steps_are_prepared_ahead(
    model_path: Path, sampler: Sampler
) -> None:
    one, _ = answers(model_path, 1)
    two, scheduler = answers(model_path, 2, sampler)
    assert scheduler.num_preemptions > 0, "the pool is not too small"
    for key, tokens in one.items():
        assert [t.token_id for t in two[key]] == [t.token_id for t in tokens], key
        for ours, theirs in zip(two[key], tokens, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None and theirs.logprobs is not None:
                assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)


def test_a_step_with_placeholders_of_another_step_than_the_last_fails(model_path: Path) -> None:
    runner = make_runner(model_path, overlaps=True)
    runner.execute(warm_up())
    with pytest.raises(EngineError, match="placeholders refer to step 5"):
        runner.launch(StepInput(6, [0], [0], [[16]], [1], [1], [[[1]]], placeholder_step=5, placeholders=[(0, 0)]))


@pytest.mark.parametrize("sampler", [HostSampler(), DeviceSampler()], ids=["host", "device"])
def test_a_placeholder_for_a_token_that_was_not_drawn_costs_the_other_rows_nothing(
    model_path: Path, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a token was not drawn is known only after the next step, which has a placeholder for it, was launched."""
    runner = make_runner(model_path, overlaps=True, sampler=sampler)
    greedy = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    samples = [SampleSpec(seq, seq, greedy, 1, 0) for seq in (0, 1)]
    first = StepInput(1, [7, 8], [0, 0], [[16, 32]], [1, 1], [1, 1], [[[1], [2]]], 2, samples)
    second = StepInput(
        2,
        [0, 0],
        [1, 1],
        [[17, 33]],
        [1, 1],
        [2, 2],
        [[[1], [2]]],
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
        runner.launch(warm_up())
    with pytest.raises(RankLost, match="illegal memory access"):
        LaunchedStep(1, LostOutput(), 0.0).wait()


class LostOutput:
    """Tokens that never arrive."""

    token_ids = torch.zeros(1, dtype=torch.int64)

    def wait(self) -> list[SampledToken]:
        raise torch.AcceleratorError("an illegal memory access was encountered")


class Watched(HostSampler):
    """Remembers that the end of a step without tokens was asked for."""

    ends = 0

    def sample(self, logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> HostSamplerOutput:
        self.ends += not specs
        return super().sample(logits, specs, unseen)


def test_a_step_that_draws_nothing_is_waited_for_too(model_path: Path) -> None:
    sampler = Watched()
    runner = make_runner(model_path, overlaps=True, sampler=sampler)
    assert runner.execute(replace(warm_up(), samples=[])).sampled == []
    assert sampler.ends == 1
    assert DeviceSampler().sample(torch.empty(0, 1), [], None).wait() == []
