"""`common.engine.loop`: idle time is used while there is no request, and only then."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from common.engine.loop import EngineLoop


class _Core:
    """Has a request while `has_deadlines`; every event takes it away or brings it."""

    def __init__(self, *, busy: bool) -> None:
        self.has_deadlines = busy
        self.rests_until_s = 0.0

    def handle(self, event: bool) -> None:
        self.has_deadlines = event

    def step(self) -> bool:
        return False

    def on_time(self, now_s: float) -> None:
        pass


class _BusyCore(_Core):
    """Steps without a pause until it has made `steps`."""

    def __init__(self, steps: int) -> None:
        super().__init__(busy=False)
        self.left = steps
        self.looked: list[int] = []

    def handle(self, event: int) -> None:
        self.left = event

    def step(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def on_time(self, now_s: float) -> None:
        self.looked.append(max(self.left, -1))


def test_while_steps_run_deadlines_are_looked_at_now_and_then_and_again_when_they_end(
    eventually: Callable[..., None],
) -> None:
    core = _BusyCore(0)
    loop = EngineLoop(core, lambda: None, _no_crash)
    loop.start()
    started = time.monotonic()
    loop.post(20_000)
    eventually(lambda: core.left < 0)
    loop.stop()
    assert len(core.looked) <= 5 + (time.monotonic() - started) / 0.02
    assert core.looked[-1] == -1


def test_idle_time_is_used_until_there_is_no_more_to_do() -> None:
    left, done = [3], threading.Event()

    def work() -> float | None:
        left[0] -= 1
        if left[0] < 0:
            done.set()
            return None
        return 0.0

    loop = EngineLoop(_Core(busy=False), lambda: None, _no_crash, use_idle_time=work)
    loop.start()
    assert done.wait(5)
    loop.stop()
    assert left == [-1], "not called again"


def test_idle_work_that_asks_for_time_is_called_again_then_and_not_before(eventually: Callable[..., None]) -> None:
    times: list[float] = []

    def work() -> float | None:
        times.append(time.monotonic())
        return 0.1 if len(times) < 3 else None

    loop = EngineLoop(_Core(busy=False), lambda: None, _no_crash, use_idle_time=work)
    loop.start()
    eventually(lambda: len(times) == 3)
    loop.stop()
    assert all(0.1 <= later - earlier < 0.9 for earlier, later in itertools.pairwise(times))


def test_a_request_ends_idle_time_and_its_end_brings_it_back(eventually: Callable[..., None]) -> None:
    calls = [0]

    def work() -> float | None:
        calls[0] += 1
        time.sleep(0.001)
        return 0.0

    loop = EngineLoop(_Core(busy=True), lambda: None, _no_crash, use_idle_time=work)
    loop.start()
    time.sleep(0.05)
    assert calls == [0]
    loop.post(False)
    eventually(lambda: calls[0] > 0)
    loop.post(True)
    before = loop.ask(lambda: calls[0]).result(5)
    time.sleep(0.05)
    assert calls == [before]
    loop.post(False)
    eventually(lambda: calls[0] > before)
    loop.stop()


def _no_crash(error: BaseException) -> None:
    raise error
