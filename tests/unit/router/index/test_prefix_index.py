"""The prefix index: bounds, eviction, expectations, and that nothing takes long."""

from __future__ import annotations

import hashlib
import os
import random
import time

import pytest
from support.mock_clock import MockClock

import router.index.prefix_index
from common.base.errors import ConfigError
from router.index.prefix_index import EXPECTATION_S, PrefixIndex, block_keys


def names(count: int, first: int = 0) -> list[bytes]:
    return [hashlib.sha256(str(i).encode()).digest()[:16] for i in range(first, first + count)]


@pytest.mark.parametrize("few", [0, 1024])
def test_room_is_bounded_and_what_is_matched_stays(few: int) -> None:
    index = PrefixIndex(400, few=few)
    hot = names(20)
    index.stored("a", hot)
    for turn in range(100):
        index.stored("b", names(37, 100 + 37 * turn))
        assert index.match(hot) == {"a": 20}
        assert len(index) <= 400
    assert index.evicted > 3000
    newest = names(37, 100 + 37 * 99)
    assert index.match(newest) == {"b": 37}
    assert index.num_blocks("a") + index.num_blocks("b") == len(index)


@pytest.mark.parametrize("few", [0, 1024])
def test_it_goes_on_past_the_last_use_that_a_stamp_can_count(few: int) -> None:
    index = PrefixIndex(400, few=few)
    index._use = 2**32 - 50
    hot = names(20)
    index.stored("a", hot)
    for turn in range(100):
        index.stored("b", names(37, 100 + 37 * turn))
        assert index.match(hot) == {"a": 20}  # used more lately than what is evicted
    assert index._use < 2**32 - 50
    assert index.evicted > 3000


@pytest.mark.parametrize("few", [0, 2, 1024])
def test_with_eviction_it_never_claims_what_a_node_does_not_hold(few: int) -> None:
    rng = random.Random(few)
    for limit in (3, 50, 150):
        index, model = PrefixIndex(limit, few=few), {f"n{i}": set[bytes]() for i in range(4)}
        for _ in range(60):
            node, some = f"n{rng.randrange(4)}", rng.choices(names(200), k=rng.randrange(1, 80))
            if rng.random() < 0.6:
                index.stored(node, some)
                model[node].update(some)
            else:
                index.removed(node, b"".join(some))
                model[node].difference_update(some)
            index.tidy()
            assert len(index) <= limit
            query = rng.sample(names(200), 60)
            for holder, depth in index.match(query).items():
                assert set(query[:depth]) <= model[holder]
            assert all(index.num_blocks(holder) <= len(held) for holder, held in model.items())


def test_siblings_of_a_burst_find_what_is_only_expected_and_it_fades() -> None:
    clock = MockClock()
    index = PrefixIndex(clock=clock)
    prompt = names(50)
    index.stored("a", prompt[:10])
    index.expect("a", prompt)
    index.expect("b", prompt[:5])
    assert index.match(prompt) == {"a": 50, "b": 5}
    index.stored("b", prompt[:5])
    clock.advance(2 * EXPECTATION_S)
    assert index.match(prompt) == {"a": 10, "b": 5}


@pytest.mark.parametrize("few", [0, 1024])
def test_a_prefix_goes_on_with_held_blocks_after_expected_ones(few: int) -> None:
    index, prompt = PrefixIndex(few=few), names(9)
    index.expect("a", prompt[:3])
    index.stored("a", prompt[3:7])
    assert index.match(prompt) == {"a": 7}


@pytest.mark.parametrize("few", [0, 1024])
def test_it_grows_and_gives_up_the_oldest_segment_by_segment(few: int) -> None:
    """Past many splits, and with room for half of what comes: as many as it may, the newest, nothing else."""
    index, blocks = PrefixIndex(30_000, few=few), [os.urandom(16 * 300) for _ in range(200)]
    for turn, blob in enumerate(blocks):
        index.stored(f"n{turn % 7}", blob)
        assert index.match(blob) == {f"n{turn % 7}": 300}
        assert len(index) == sum(index.num_blocks(f"n{i}") for i in range(7)) <= 30_000
    assert len(index) > 25_000
    assert index.evicted + len(index) == 60_000
    for turn, blob in enumerate(blocks[150:], 150):
        assert index.match(blob) == {f"n{turn % 7}": 300}
        index.removed(f"n{turn % 7}", blob)
        assert index.match(blob) == {}


@pytest.mark.parametrize("few", [0, 1024])
def test_hits_are_a_mapping_and_a_column(few: int) -> None:
    index, prompt = PrefixIndex(few=few), names(5)
    for depth in range(1, 5):
        index.stored(f"n{depth}", prompt[:depth])
    index.expect("n1", prompt, "new")
    hits = index.match(prompt)
    assert hits == {"n1": 5, "n2": 2, "n3": 3, "n4": 4, "new": 5}
    assert (len(hits), hits.get("n2"), hits.get("unknown"), "unknown" in hits) == (5, 2, None, False)
    assert hits.column(hits.places(["n4", "unknown", "n1"])).tolist() == [4, 0, 5]
    assert hits.without(["n1", "unknown"]) == {"n2": 2, "n3": 3, "n4": 4, "new": 5}
    index.drop("n4")
    assert hits["n4"] == 4, "what was answered stays"
    assert index.match(names(3, 100)) == index.match([]) == {}


def test_hashes_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError):
        PrefixIndex().stored("a", b"seventeen bytes!!")


def test_a_thousand_restarts_leave_no_trace() -> None:
    index = PrefixIndex(100_000)
    for turn in range(1000):
        index.replace("node", names(5, turn))
        index.drop("other")
        index.stored("other", names(3, turn))
        while index.tidy():
            pass
    assert len(index) <= 8
    assert len(index._names) <= 4
    assert len(index._masks) <= 16


@pytest.mark.parametrize("few", [0, 1024])
def test_holders_that_come_and_go_leave_no_trace(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.index.prefix_index, "_FEW_MASKS", 64)
    rng, index = random.Random(few), PrefixIndex(100_000, few=few)
    held = {f"n{i}": set[bytes]() for i in range(30)}
    blocks, most = names(12), 0
    for turn in range(3000):
        node, some = rng.choice(list(held)), rng.sample(blocks, rng.randrange(1, 5))
        if turn % 500 == 499:
            index.drop(node)
            held[node] = set()
        elif rng.random() < 0.5:
            index.stored(node, some)
            held[node].update(some)
        else:
            index.removed(node, some)
            held[node].difference_update(some)
        index.tidy()
        most = max(most, len(index._masks))
        (block,) = rng.sample(blocks, 1)
        assert set(index.match([block])) == {name for name, its in held.items() if block in its}
    assert most < 500  # thousands of sets of holders were seen
    assert {name: index.num_blocks(name) for name in held} == {name: len(its) for name, its in held.items()}


def test_a_quarter_of_a_million_blocks_leave_without_holding_up_the_loop() -> None:
    index = PrefixIndex()
    for _ in range(64):
        index.stored("a", os.urandom(16 * 4096))
    index.stored("b", names(100))
    longest_s, more = 0.0, True
    index.drop("a")
    while more:
        started_s = time.thread_time()
        more = index.tidy()
        longest_s = max(longest_s, time.thread_time() - started_s)
    assert len(index) == 100
    assert longest_s < 0.05


@pytest.mark.parametrize("few", [0, 1024])
def test_a_look_without_touching_keeps_nothing_alive(few: int) -> None:
    looked_at, used = PrefixIndex(400, few=few), PrefixIndex(400, few=few)
    for index, touch in ((looked_at, False), (used, True)):
        index.stored("a", names(20))
        for turn in range(30):
            index.stored("b", names(37, 100 + 37 * turn))
            index.match(names(20), touch=touch)
    assert used.match(names(20)) == {"a": 20}
    assert looked_at.match(names(20)) == {}


def test_keys_are_the_same_however_many_are_made_at_once() -> None:
    hashes = [os.urandom(16) for _ in range(40)] + [bytes(16), b"8 bytes." * 2]
    at_once = [int(key) for key in block_keys(hashes)]
    assert at_once == [key for each in hashes for key in block_keys([each])]
    assert min(at_once) == 1, "0 is that of an empty place"
    assert block_keys(keys := block_keys(hashes[:2])) is keys
    with pytest.raises(ValueError):
        block_keys([b"short"])


@pytest.mark.parametrize("num_blocks", [1 << 50, 1 << 70])
def test_an_index_for_which_there_is_no_memory_is_a_wrong_configuration(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match="lower --index-blocks"):
        PrefixIndex(num_blocks)
