"""When the garbage collector stops the router: seldom, and for everything only in quiet times."""

from __future__ import annotations

import asyncio
import gc

import pytest

from router import gc_policy


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[rounds over new objects so far]; a round over all sets it to 0 and adds an entry."""
    found = [0]

    def collect() -> None:
        found.append(found[0])
        found[0] = 0

    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(gc, "get_count", lambda: (0, found[0], 0))
    monkeypatch.setattr(gc_policy, "_LOOK_EVERY_S", 1e-4)
    return found


async def _looks(running: list[int]) -> None:
    """So many looks as `running` has entries: what each of them finds."""
    left = list(running)
    done = asyncio.Event()

    def look() -> int:
        found = left.pop(0)
        if not left:
            done.set()
        return found

    task = asyncio.create_task(gc_policy.run(look))
    await asyncio.wait_for(done.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_no_round_by_itself_looks_at_what_is_old_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = gc.get_threshold(), list[tuple[int, int, int]]()

    def look() -> int:
        seen.append(gc.get_threshold())
        raise asyncio.CancelledError

    monkeypatch.setattr(gc_policy, "_LOOK_EVERY_S", 1e-4)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(gc_policy.run(look))
    [(new, middle, old)] = seen
    assert new <= 20_000
    assert min(middle, old) > 10**9
    assert gc.get_threshold() == before, "whoever runs a router beside something else has its garbage collected"


def test_everything_is_looked_at_when_it_was_quiet_for_a_while(rounds: list[int]) -> None:
    rounds[0] = 30
    asyncio.run(_looks([0] * 9 + [1] + [0] * 9))
    assert rounds == [30], "one request came in between"
    asyncio.run(_looks([0] * 10))
    assert rounds == [0, 30]


def test_not_for_a_few_objects(rounds: list[int]) -> None:
    rounds[0] = 3
    asyncio.run(_looks([0] * 30))
    assert rounds == [3]


def test_at_last_also_under_load(rounds: list[int]) -> None:
    rounds[0] = 1999
    asyncio.run(_looks([5] * 3))
    assert rounds == [1999]
    rounds[0] = 2000
    asyncio.run(_looks([5]))
    assert rounds == [0, 2000]
