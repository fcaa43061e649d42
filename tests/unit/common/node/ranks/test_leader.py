"""A start that hangs: its deadline, and that it can be stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.stub_node import make_model_folder

from common.base.errors import ConfigError, RankLost
from common.base.process import on_own_thread
from common.config.service_configs import PrefillConfig
from common.node.ranks.leader import Leader
from common.node.ranks.messages import RankStarted
from prefill_node.role import ROLE


class Hang:
    """Stands for the loading of a model that never comes back, a lock or a file system that does not answer."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.over = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.began.set()
        self.over.wait(60)
        raise ConfigError("nobody waits for this any more")


@pytest.fixture(autouse=True)
def own_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start settles how its thread computes, which here is the thread of all tests."""
    monkeypatch.setattr("common.node.ranks.leader.configure_torch", lambda _: None)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    made = Hang()
    monkeypatch.setattr("common.node.ranks.leader.load_worker", made)
    yield made
    made.over.set()
    for thread in threading.enumerate():
        if thread.name == "start":
            thread.join(10)


def leader(tmp_path: Path, start_timeout_s: float) -> Leader:
    model = str(make_model_folder(tmp_path / "model"))
    config = PrefillConfig(model=model, load_format="dummy", start_timeout_s=start_timeout_s)
    return Leader(ROLE, ROLE.plan(config))


def test_a_model_that_never_loads_ends_the_start_at_its_deadline(tmp_path: Path, hang: Hang) -> None:
    with pytest.raises(ConfigError, match="the model was not loaded within 1 s; raise --start-timeout-s to allow more"):
        asyncio.run(asyncio.wait_for(leader(tmp_path, 1.0).load(), 30))
    assert hang.began.is_set()
    assert not hang.over.is_set(), "the process would have ended while the load still hung"


class OneOther:
    """Stands for the links to one other rank, which is always there."""

    def __init__(self) -> None:
        self.closed = False

    def collect(self, kind: type, timeout_s: float, what: str, *, since_s: float) -> dict[int, Any]:
        return {1: SimpleNamespace(data_address="there")}

    def broadcast(self, order: object) -> None:
        pass

    def prefer_rank_error(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self.closed = True


def of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_timeout_s: float) -> tuple[Leader, OneOther]:
    monkeypatch.setattr("common.node.ranks.leader._GRACE_S", 0.5)
    monkeypatch.setattr("common.node.ranks.leader.join_mesh", lambda *_, **__: None)
    made, links = leader(tmp_path, start_timeout_s), OneOther()
    made.links = links  # type: ignore[assignment]
    return made, links


def test_a_leader_of_ranks_whose_own_part_never_loads_has_the_deadline_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    made, links = of_two_ranks(tmp_path, monkeypatch, 1.0)
    with pytest.raises(ConfigError, match="the model was not loaded within 1 s"):
        asyncio.run(asyncio.wait_for(made.load(), 30))
    assert links.closed


def test_the_end_of_a_start_has_what_its_beginning_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = of_two_ranks(tmp_path, monkeypatch, 600.0)
    over = threading.Event()
    made.worker = SimpleNamespace(capture_graphs=lambda: over.wait(60))  # type: ignore[assignment]
    made._since_s -= 600.0
    with pytest.raises(ConfigError, match="the model was not loaded within 600 s"):
        asyncio.run(asyncio.wait_for(made.start_ranks("prefill", "an-incarnation", "here"), 30))
    assert made.data_addresses == ["here"]
    over.set()


def test_a_start_that_hangs_can_be_stopped(tmp_path: Path, hang: Hang) -> None:
    async def scene() -> None:
        start = asyncio.create_task(leader(tmp_path, 600.0).load())
        assert await asyncio.to_thread(hang.began.wait, 30)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert not hang.over.is_set()


def test_another_timeout_of_the_start_keeps_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(*args: Any, **kwargs: Any) -> None:
        raise TimeoutError("a socket of the start")

    monkeypatch.setattr("common.node.ranks.leader.load_worker", times_out)
    with pytest.raises(TimeoutError, match="a socket of the start"):
        asyncio.run(leader(tmp_path, 30.0).load())


def test_what_fails_on_its_own_thread_fails_here() -> None:
    def fails() -> None:
        raise ConfigError("as it says")

    with pytest.raises(ConfigError, match="as it says"):
        asyncio.run(on_own_thread(fails, "start"))


class Listening(OneOther):
    """Links whose reports the test makes."""

    def run(self, on_report: Any, on_dead: Any, lease_s: float) -> None:
        self.report, self.die = on_report, on_dead


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_dead: Any) -> tuple[Leader, Listening]:
    """A leader of two ranks that has served in one role."""
    made, _ = of_two_ranks(tmp_path, monkeypatch, 600.0)
    links = Listening()
    made.links, made._plan = links, SimpleNamespace(world_size=2, config=made._plan.config)  # type: ignore[assignment]
    made.worker = SimpleNamespace(capture_graphs=lambda: None)  # type: ignore[assignment]
    asyncio.run(made.start_ranks("prefill", "one", ""))
    made.watch(print, print, on_dead, print)
    return made, links


def test_ranks_that_have_changed_their_role_give_their_new_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, links = watched(tmp_path, monkeypatch, print)
    links.report(RankStarted(1, "elsewhere"))
    asyncio.run(made.start_ranks("decode", "two", "here"))
    assert made.data_addresses == ["here", "elsewhere"]


def test_a_rank_that_ends_between_two_roles_ends_the_node_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, BaseException]] = []
    lost = RankLost("rank 1 ended")
    before, links = watched(tmp_path, monkeypatch, lambda error: told.append(("old role", error)))
    links.die(lost)
    with pytest.raises(RankLost, match="rank 1 ended"):
        asyncio.run(before.start_ranks("decode", "two", "here"))

    after, links = watched(tmp_path, monkeypatch, lambda error: None)
    links.report(RankStarted(1, "elsewhere"))
    asyncio.run(after.start_ranks("decode", "two", "here"))
    links.die(lost)
    after.watch(print, print, lambda error: told.append(("new role", error)), print)
    assert told == [("old role", lost), ("new role", lost)]


def test_a_rank_that_never_changes_its_role_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = watched(tmp_path, monkeypatch, print)
    made._plan.config = SimpleNamespace(rank_timeout_s=0.05)  # type: ignore[misc]
    with pytest.raises(RankLost, match=r"ranks \[1\] have not changed their role within 0.05 s"):
        asyncio.run(made.start_ranks("decode", "two", "here"))
