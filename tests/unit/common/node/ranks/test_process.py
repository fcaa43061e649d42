"""A node of several ranks: how busy they are, how long they wait for each other, what ends them together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from support.fake_engine import Computed

from common.base.errors import EngineError, PeerLost, RankLost
from common.config.service_configs import DecodeConfig
from common.engine.executor import LocalExecutor
from common.engine.step import StepInput, StepOutput
from common.node.profile_run import warm_up
from common.node.ranks import main
from common.node.ranks.links import MultiRankExecutor
from common.node.ranks.messages import LeaderBeat
from common.node.ranks.process import RankProcess


class Runner:
    """Reports the given forward times; fails where there is none."""

    def __init__(self, *forward_s: float) -> None:
        self.forward_s = list(forward_s)

    def launch(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> Computed:
        if not self.forward_s:
            raise EngineError("no more steps")
        return Computed(StepOutput(step.step_id, [], self.forward_s.pop(0)))


def test_an_executor_adds_up_what_its_steps_took_and_a_failed_step_adds_nothing() -> None:
    executor = LocalExecutor(Runner(0.25, 0.5))
    assert executor.busy_s == 0.0
    for _ in range(2):
        executor.submit(warm_up())
    with pytest.raises(EngineError):
        executor.submit(warm_up())
    assert executor.busy_s == 0.75


@pytest.mark.parametrize("error", [EngineError("one"), TypeError("two"), MemoryError()])
def test_whatever_ends_the_leaders_part_of_a_step_ends_the_node(error: Exception) -> None:
    class Links:
        def broadcast(self, order: object) -> None:
            pass

    class Broken:
        def start(self, step: StepInput) -> Computed:
            raise error

    executor = MultiRankExecutor(Links(), Broken(), samples_here=True)  # type: ignore[arg-type]
    with pytest.raises(RankLost):
        executor.submit(warm_up())


def test_a_rank_that_is_ready_waits_for_the_slowest_one_as_long_as_the_start_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed_s: list[float] = []

    def receive(self: RankProcess, timeout_s: float) -> object:
        allowed_s.append(timeout_s)
        if len(allowed_s) == 3:
            raise PeerLost("silent")
        return LeaderBeat(1)

    monkeypatch.setattr(RankProcess, "_receive", receive)
    process = RankProcess.__new__(RankProcess)
    process._plan = SimpleNamespace(config=DecodeConfig(model="m", lease_s=2.0, start_timeout_s=90.0))
    process._ending = threading.Event()
    process._ending.set()
    steps: queue.SimpleQueue[StepInput | Exception] = queue.SimpleQueue()
    process._take_orders(steps, SimpleNamespace())  # type: ignore[arg-type]
    assert allowed_s == [90.0, 2.0, 2.0]
    assert isinstance(steps.get_nowait(), PeerLost)


def test_a_rank_that_lost_its_leader_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(self: RankProcess) -> None:
        raise PeerLost("the leader was silent for 3 s")

    monkeypatch.setattr(RankProcess, "__init__", lambda *_: None)
    monkeypatch.setattr(RankProcess, "run", run)
    for name in ("name_process", "configure", "prepare_compute"):
        monkeypatch.setattr(main, name, lambda *_, **__: None)
    monkeypatch.setattr(main, "lasting_imports", nullcontext)
    role = SimpleNamespace(plan=lambda config: None)
    monkeypatch.setattr(main, "load_role", lambda _: role)
    fields = asdict(DecodeConfig(model="m"))
    with pytest.raises(SystemExit) as ended:
        main.run_rank("decode", fields, 1, "tcp://127.0.0.1:1")
    assert ended.value.code == 1
    assert caplog.messages == ["rank 1 ends: the leader was silent for 3 s"]
