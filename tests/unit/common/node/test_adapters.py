"""Requests with adapters on both nodes, and what the prefix cache shares among them."""

from __future__ import annotations

import random

import pytest
from support.fake_adapters import FakeLoader, source
from support.node_pair import D_REF, KEY, P_REF, PROMPT, ROUTER, Pair

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    Adapter,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    PrefillRequest,
    SamplingParams,
)
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.kv.pool import BlockPool
from common.node.adapter_table import AdapterTable
from common.node.events import FromClient, ToClient


def a_pair() -> tuple[Pair, FakeLoader, FakeLoader]:
    """Both nodes serve adapter "a", which is not in memory yet."""
    pair = Pair()
    loaders = FakeLoader(), FakeLoader()
    for core, loader in zip((pair.p, pair.d), loaders, strict=True):
        core.adapters = AdapterTable(loader, 2, [source("a")])
    return pair, *loaders


def send(pair: Pair, adapter: Adapter, key: AttemptKey = KEY) -> None:
    asked = EngineRequest(pack_ids(PROMPT), SamplingParams(seed=0, max_tokens=3, temperature=0.0), adapter=adapter)
    pair.d.handle(FromClient(ROUTER, DecodeRequest(key, asked, pack_ids(), P_REF, 600.0)))
    pair.p.handle(FromClient(ROUTER, PrefillRequest(key, asked, pack_ids(), D_REF, 600.0)))


def test_a_request_waits_for_its_adapter_beside_the_batch_and_steps_then_name_it() -> None:
    pair, p_loader, _ = a_pair()
    send(pair, source("a").adapter)
    assert not pair.p.step()
    p_loader.finish(pair.p.adapters)
    assert pair.p.step()
    assert pair.p.attempts[KEY].seq.adapter_id == 1
    assert pair.p.attempts[KEY].seq.root == root_hash("fake", lora_id=source("a").adapter.lora_id)


def test_an_adapter_that_a_node_lacks_or_has_with_other_weights_fails_the_attempt_at_once() -> None:
    pair, _, _ = a_pair()
    for number, adapter in enumerate([source("b").adapter, source("a", "other").adapter]):
        send(pair, adapter, AttemptKey(f"r{number}", 1))
    failed = [out.message for out in pair.p_out + pair.d_out if isinstance(out, ToClient)]
    for core in (pair.p, pair.d):
        core.send_buffer.flush()
    failed = [out.message for out in pair.p_out + pair.d_out if isinstance(out, ToClient)]
    assert [type(message) for message in failed] == [AttemptFailed] * 4
    assert {message.code for message in failed if isinstance(message, AttemptFailed)} == {"adapter_missing"}
    assert not pair.p.attempts
    assert not pair.d.attempts


def test_an_adapter_that_was_unloaded_leaves_memory_when_its_last_request_has_ended() -> None:
    pair, p_loader, _ = a_pair()
    send(pair, source("a").adapter)
    p_loader.finish(pair.p.adapters)
    pair.p.adapters.unregister("a")
    pair.p.on_time(0.0)
    assert p_loader.dropped == []
    pair.p._end(pair.p.attempts[KEY], "test")  # pyright: ignore[reportPrivateUsage]
    pair.p.on_time(0.0)
    assert p_loader.dropped == [1]


def test_a_request_that_is_over_makes_no_adapter_leave() -> None:
    pair = Pair()
    loader, core = FakeLoader(), pair.p
    core.adapters = AdapterTable(loader, 1, [source("a"), source("b")])
    keys = [AttemptKey(name, 1) for name in ("first", "left", "second")]
    send(pair, source("a").adapter, keys[0])
    loader.finish(core.adapters)
    send(pair, source("b").adapter, keys[1])
    send(pair, source("a").adapter, keys[2])
    assert core.attempts[keys[2]].seq.adapter_id == 0
    core.handle(FromClient(ROUTER, Abort(keys[1])))
    core.on_time(0.0)
    assert core.attempts[keys[2]].seq.adapter_id == 1
    assert core.adapters.is_settled


@pytest.mark.parametrize(("p_blocks", "d_blocks"), [(32, 4), (4, 32)])
def test_who_waits_for_an_adapter_holds_no_blocks_that_those_who_use_the_other_one_need(
    p_blocks: int, d_blocks: int
) -> None:
    """Blocks of one node suffice for one request, and the decode node has one adapter in memory: the first request's, while the
    prefill node computes the second one first."""
    pair = Pair(p_blocks=p_blocks, d_blocks=d_blocks)
    loaders = FakeLoader(), FakeLoader()
    for core, loader, most in zip((pair.p, pair.d), loaders, (2, 1), strict=True):
        core.adapters = AdapterTable(loader, most, [source("a"), source("b")])
    keys = [AttemptKey(name, 1) for name in "ab"]
    asked = [
        EngineRequest(
            pack_ids([*PROMPT, number]),
            SamplingParams(seed=0, max_tokens=3, temperature=0.0),
            adapter=source(key.request_id).adapter,
        )
        for number, key in enumerate(keys)
    ]
    for key, request in zip(keys, asked, strict=True):
        pair.d.handle(FromClient(ROUTER, DecodeRequest(key, request, pack_ids(), P_REF, 600.0)))
        loaders[1].finish(pair.d.adapters)
    for key, request in reversed(list(zip(keys, asked, strict=True))):
        pair.p.handle(FromClient(ROUTER, PrefillRequest(key, request, pack_ids(), D_REF, 600.0)))
        loaders[0].finish(pair.p.adapters)
    for _ in range(60):
        pair.run(1)
        for core, loader in zip((pair.p, pair.d), loaders, strict=True):
            core.on_time(pair.clock())
            loader.finish(core.adapters)
    assert [len(pair.tokens(key)) for key in keys] == [3, 3]
    pair.assert_whole()


def test_a_thousand_prompts_over_eight_adapters_hit_only_blocks_of_the_same_adapter_and_weights() -> None:
    draw = random.Random(1)
    scheduler = Scheduler(SchedulerConfig(256, 4, 256, 256), BlockPool(4096))
    prompts = [[draw.randrange(250) for _ in range(64)] for _ in range(3)]
    seen: set[tuple[int, str]] = set()
    for number in range(1000):
        index, adapter = draw.randrange(3), Adapter(f"a{draw.randrange(8)}", "old" if number < 500 else "new")
        request = EngineRequest(pack_ids(prompts[index]), SamplingParams(seed=0, max_tokens=1), adapter=adapter)
        root = root_hash("f", lora_id=request.lora_id)
        seq = Sequence(AttemptKey(str(number), 1), request, list(prompts[index]), root, 0.0)
        scheduler.add(seq)
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, [SampledToken(7)])
        assert seq.cached_tokens == (48 if (index, adapter.lora_id) in seen else 0)
        seen.add((index, adapter.lora_id))
    assert len(seen) == 3 * 8 * 2


@pytest.mark.parametrize("ids", [[0, 2, 1, 2, 0, 1]])
def test_rows_of_one_adapter_are_neighbours_in_a_step(ids: list[int]) -> None:
    scheduler = Scheduler(SchedulerConfig(256, 8, 256, 256), BlockPool(64))
    for number, adapter_id in enumerate(ids):
        request = EngineRequest(pack_ids([5] * 9), SamplingParams(seed=0, max_tokens=4))
        seq = Sequence(AttemptKey(str(number), 1), request, [5] * 9, root_hash(str(number)), 0.0)
        seq.adapter_id = adapter_id
        scheduler.add(seq)
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.step.adapters == sorted(ids)
        scheduler.update(plan, [SampledToken(7)] * len(plan.step.samples))
