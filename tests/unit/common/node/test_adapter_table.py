"""Which adapters are in memory, and who waits for one."""

from __future__ import annotations

import random

import pytest
from support.fake_adapters import FakeLoader, source

from common.base.errors import AdapterMissing, BadRequest, ConfigError, KvRelayError, NotFound
from common.node.adapter_table import LOAD_TIMEOUT_S, AdapterTable


class Requests:
    """What waiting requests were told."""

    def __init__(self, table: AdapterTable) -> None:
        self.table = table
        self.told: dict[str, int | KvRelayError] = {}

    def take(self, request: str, name: str) -> int | None:
        adapter = source(name).adapter
        self.table.check(adapter)
        return self.table.take(adapter, 0.0, lambda result: self.told.update({request: result}))


def a_table(names: str, max_loras: int) -> tuple[AdapterTable, FakeLoader, Requests]:
    loader = FakeLoader()
    table = AdapterTable(loader, max_loras, [source(name) for name in names])
    return table, loader, Requests(table)


def test_requests_wait_for_an_adapter_that_is_loaded_once() -> None:
    table, loader, requests = a_table("a", 1)
    assert requests.take("r1", "a") is None
    assert requests.take("r2", "a") is None
    assert [load[0] for load in loader.loads] == [1]
    loader.finish(table)
    assert requests.told == {"r1": 1, "r2": 1}
    assert requests.take("r3", "a") == 1


def test_the_least_recently_used_adapter_makes_room_when_its_last_request_has_ended() -> None:
    table, loader, requests = a_table("abc", 2)
    for name in "ab":
        requests.take(name, name)
    loader.finish(table)
    assert requests.take("again", "a") == 1  # b is the least recently used one now
    assert requests.take("c", "c") is None
    table.settle({1, 2}, 0.0)
    assert loader.dropped == []
    assert requests.take("late", "b") is None, "an adapter that leaves takes no more requests"
    table.settle({1}, 0.0)
    assert loader.dropped == [2]
    loader.finish(table)
    assert requests.told["c"] == 3
    assert not table.is_settled  # "late" still waits; a leaves for it
    table.settle(set(), 0.0)
    loader.finish(table)
    assert requests.told["late"] == 4
    assert table.is_settled


def test_an_unloaded_adapter_stays_until_its_requests_have_ended_and_its_name_can_get_other_weights() -> None:
    table, loader, requests = a_table("a", 2)
    requests.take("r", "a")
    loader.finish(table)
    with pytest.raises(BadRequest, match="unload it first"):
        table.register(source("a", "other"))
    table.unregister("a")
    with pytest.raises(AdapterMissing):
        table.check(source("a").adapter)
    table.register(source("a", "other"))
    with pytest.raises(AdapterMissing, match="other weights"):
        table.check(source("a").adapter)
    assert table.take(source("a", "other").adapter, 0.0, lambda result: None) is None
    table.settle({1}, 0.0)
    assert loader.dropped == []
    table.settle(set(), 0.0)
    assert loader.dropped == [1]
    with pytest.raises(NotFound):
        table.unregister("b")


def test_a_failed_load_is_told_to_those_who_wait_and_tried_again_for_the_next() -> None:
    table, loader, requests = a_table("a", 1)
    requests.take("r", "a")
    loader.finish(table, ConfigError("no such file"))
    assert isinstance(requests.told["r"], ConfigError)
    requests.take("r2", "a")
    loader.finish(table)
    assert requests.told["r2"] == 2


def test_waiting_ends_with_an_error_when_no_room_comes_or_the_adapter_is_unloaded() -> None:
    table, loader, requests = a_table("abc", 1)
    requests.take("a", "a")
    loader.finish(table)
    requests.take("b", "b")
    requests.take("c", "c")
    table.unregister("c")
    assert isinstance(requests.told["c"], AdapterMissing)
    table.settle({1}, LOAD_TIMEOUT_S + 1)
    assert isinstance(requests.told["b"], AdapterMissing)
    table.settle(set(), LOAD_TIMEOUT_S + 1)
    assert table.is_settled


def test_an_adapter_stays_when_nobody_waits_for_its_room_any_more() -> None:
    """It took no requests until its last one had ended, for the room of one whose client had left."""
    table, loader, requests = a_table("abc", 1)
    requests.take("a", "a")
    loader.finish(table)
    connected = {"b"}
    table.take(source("b").adapter, 0.0, lambda result: requests.told.update(b=result), lambda: "b" in connected)
    assert requests.take("a2", "a") is None
    table.settle({1}, 0.0)
    assert set(requests.told) == {"a"}
    connected.clear()
    table.settle({1}, 0.0)
    assert isinstance(requests.told["b"], AdapterMissing)
    assert requests.told["a2"] == 1
    assert table.is_settled
    assert requests.take("a3", "a") == 1

    requests.take("c", "c")
    requests.take("a4", "a")
    table.settle({1}, LOAD_TIMEOUT_S + 1)
    assert isinstance(requests.told["c"], AdapterMissing)
    assert isinstance(requests.told["a4"], AdapterMissing)
    assert requests.take("a5", "a") == 1


def test_an_adapter_that_was_unloaded_and_loaded_again_is_used_where_it_is() -> None:
    table, loader, requests = a_table("ab", 1)
    requests.take("a", "a")
    loader.finish(table)
    table.unregister("a")
    table.register(source("a"))
    assert requests.take("a2", "a") is None
    table.settle({1}, 0.0)
    assert requests.told["a2"] == 1
    requests.take("b", "b")
    table.unregister("b")
    table.register(source("b"))
    requests.take("b2", "b")
    table.settle(set(), 0.0)
    loader.finish(table)
    assert requests.told["b2"] == 2


def test_memory_stays_bounded_and_every_request_is_served_under_random_use() -> None:
    draw = random.Random(3)
    table, loader, requests = a_table("abcdefgh", 3)
    running: dict[str, int] = {}
    for number in range(600):
        name = draw.choice("abcdefgh")
        adapter_id = requests.take(f"r{number}", name)
        if adapter_id is not None:
            requests.told[f"r{number}"] = adapter_id
        running |= {request: told for request, told in requests.told.items() if request not in running}  # type: ignore[misc]
        for request in draw.sample(sorted(running), min(2, len(running))):
            running[request] = 0  # ended
        table.settle({adapter_id for adapter_id in running.values() if adapter_id}, 0.0)
        assert loader.num_in_memory <= 3
        assert all(adapter_id in loader.in_memory for adapter_id in running.values() if adapter_id)
        if draw.random() < 0.5:
            loader.finish(table)
    for _ in range(20):
        running = dict.fromkeys(requests.told, 0)
        table.settle(set(), 0.0)
        loader.finish(table)
    assert len(requests.told) == 600
    assert not any(isinstance(told, KvRelayError) for told in requests.told.values())


@pytest.mark.parametrize("seed", range(40))
def test_every_wait_ends_once_whoever_leaves_and_whatever_is_unloaded(seed: int) -> None:
    draw = random.Random(seed)
    max_loras, names = draw.randrange(1, 4), "abcde"[: draw.randrange(1, 6)]
    table, loader, _ = a_table(names, max_loras)
    waiting: dict[int, bool] = {}
    """Requests that were not told yet, and whether they still want to know."""
    running: dict[int, int] = {}

    def take(request: int) -> None:
        adapter = source(draw.choice(names)).adapter
        if adapter not in table.adapters:
            return

        def told(result: int | KvRelayError) -> None:
            if waiting.pop(request) and isinstance(result, int):  # KeyError: it was told twice
                running[request] = result

        waiting[request] = True
        adapter_id = table.take(adapter, 0.0, told, lambda: waiting[request])
        if adapter_id is not None:
            told(adapter_id)

    def check() -> None:
        table.settle(set(running.values()), 0.0)
        assert loader.num_in_memory <= max_loras
        assert loader.in_memory.issuperset(running.values())

    for number in range(150):
        take(number)
        if running and draw.random() < 0.7:
            del running[draw.choice(list(running))]
        if waiting and draw.random() < 0.2:
            waiting[draw.choice(list(waiting))] = False
        if draw.random() < 0.4:
            loader.finish(table, ConfigError("no such file") if draw.random() < 0.1 else None)
        if draw.random() < 0.1:
            name = draw.choice(names)
            if source(name).adapter in table.adapters:
                table.unregister(name)
            else:
                table.register(source(name))
        if draw.random() < 0.5:
            check()
    for _ in range(4 * len(names)):
        running.clear()
        check()
        loader.finish(table)
    assert not waiting
    check()
    assert table.is_settled
