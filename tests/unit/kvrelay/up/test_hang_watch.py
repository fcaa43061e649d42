"""A service that runs and answers nobody is killed; one that is slow, starting or restarted is not."""

from __future__ import annotations

import asyncio
import io
import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvrelay.up.console import Console
from kvrelay.up.hang_watch import HangWatch

PERIOD_S = 0.02


@dataclass
class FakeChild:
    name: str
    answers: list[bool] = field(default_factory=list)
    """Of each period; the last one stays."""
    ready: bool = True
    pid: int = 1
    role: str = "decode"
    signals: list[int] = field(default_factory=list)

    @property
    def spec(self) -> Any:
        return SimpleNamespace(name=self.name, role=self.role)

    def signal(self, number: int) -> None:
        self.signals.append(number)


async def watch(*children: FakeChild, periods: int) -> str:
    out = io.StringIO()
    asked: dict[str, int] = {}

    async def answers(child: Any) -> bool:
        number = asked[child.name] = asked.get(child.name, -1) + 1
        if child.answers[min(number, len(child.answers) - 1)]:
            return True
        await asyncio.sleep(3600)
        return False

    watching = asyncio.create_task(HangWatch(list(children), Console([], out), answers, PERIOD_S).run())  # type: ignore[arg-type]
    while sum(asked.values(), len(asked)) < periods:
        await asyncio.sleep(PERIOD_S / 4)
    await asyncio.sleep(3 * PERIOD_S)
    watching.cancel()
    return out.getvalue()


def test_a_child_is_killed_after_two_unanswered_probes() -> None:
    hung, well = FakeChild("hung", [False]), FakeChild("well", [True])
    said = asyncio.run(watch(hung, well, periods=6))
    assert signal.SIGKILL in hung.signals
    assert well.signals == []
    assert "hung does not answer (pid 1): killing it" in said


def test_one_missed_probe_is_forgiven_and_a_starting_child_is_not_asked() -> None:
    slow = FakeChild("slow", [False, True, False, True, True])
    starting = FakeChild("starting", [False], ready=False)
    asyncio.run(watch(slow, starting, periods=5))
    assert slow.signals == starting.signals == []
