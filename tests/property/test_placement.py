"""Placing over random fleets: invariants of every policy."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import Unavailable
from common.control.messages import Role
from router.index.prefix_hits import PrefixHits
from router.policy import POLICIES, Fleet, Memory, Query, Routing, kv_aware, picker, place
from router.policy import fleet as fleet_module
from router.policy.fleet import NAMES

KINDS = ("one", "two", "three")
node = st.fixed_dictionaries(
    {
        "kv_kind": st.sampled_from(KINDS),
        "waiting": st.integers(0, 100),
        "running": st.integers(0, 100),
        "queued_tokens": st.integers(0, 100_000),
        "free_blocks": st.integers(0, 1000),
        "total_blocks": st.just(1000),
        "capacity": st.integers(1, 64),
        "in_flight": st.integers(0, 50),
        "in_flight_blocks": st.integers(0, 2000),
        "ended": st.integers(0, 50),
        "slowness": st.floats(0.01, 100),
        "token_bytes": st.integers(1, 10**6),
    }
)
nodes = st.lists(node, max_size=8)


def fleet(role: Role, specs: list[dict[str, Any]], order: list[int]) -> Fleet:
    made = Fleet(role)
    for number in sorted(range(len(specs)), key=lambda number: order[number % len(order)]):
        values = dict(specs[number])
        made.add(f"{role}-{number}", f"inc-{role}-{number}", kv_kind=values.pop("kv_kind"), **values)
    return made


def figures(made: Fleet) -> list[dict[str, float]]:
    return [made.values(incarnation) for incarnation in made.incarnations]


@settings(max_examples=300, deadline=None)
@given(
    prefill=nodes,
    decode=nodes,
    policy=st.sampled_from(sorted(POLICIES)),
    data=st.data(),
    num_tokens=st.integers(1, 20_000),
    last=st.booleans(),
    seed=st.integers(0, 2**32),
    threshold=st.sampled_from([None, 0, 500]),
)
def test_placement_rules(
    prefill: list[dict[str, Any]],
    decode: list[dict[str, Any]],
    policy: str,
    data: st.DataObject,
    num_tokens: int,
    last: bool,
    seed: int,
    threshold: int | None,
) -> None:
    orders = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    fleets = [fleet("prefill", prefill, orders), fleet("decode", decode, orders)]
    everyone = [incarnation for each in fleets for incarnation in each.incarnations]
    some = st.lists(st.sampled_from(everyone), unique=True) if everyone else st.just(list[str]())
    avoid = frozenset(data.draw(some))
    hits = {name: data.draw(st.integers(1, num_tokens // 16 + 1)) for name in data.draw(some)}
    query = Query(num_tokens, avoid, last, hits, max_new_tokens=100, session=data.draw(st.sampled_from(["", "s"])))

    def decide(prefill: Fleet, decode: Fleet) -> Any:
        return place(
            query,
            prefill,
            decode,
            Routing(POLICIES[policy], threshold, Memory(random.Random(seed))),
            shown_count=None,
        )

    if not decode:
        with pytest.raises(Unavailable):
            decide(*fleets)
        return
    before = [figures(each) for each in fleets]
    decision = decide(*fleets)
    assert [figures(each) for each in fleets] == before, "a decision changes nothing"
    assert decision == decide(*fleets), "the same snapshot and seed give the same decision"
    assert decision == decide(fleet("prefill", prefill, [0]), fleet("decode", decode, [0])), (
        "in whatever order they came"
    )
    assert decision.reason
    assert decision.ttft_s >= 0

    target = decision.decode
    kinds = {f"inc-decode-{n}": spec["kv_kind"] for n, spec in enumerate(decode)}
    kinds |= {f"inc-prefill-{n}": spec["kv_kind"] for n, spec in enumerate(prefill)}
    assert target.incarnation not in avoid or all(name in avoid for name in fleets[1].incarnations)
    considered = [name for name in fleets[1].incarnations if name not in avoid] or fleets[1].incarnations
    assert target.node_id in decision.decode.scores
    if policy != "power_of_two":
        assert len(decision.decode.scores) == len(considered), "every candidate is explained"
    if decision.prefill is None:
        assert decision.mode == "local"
        return
    assert decision.mode == "relayed"
    source = decision.prefill
    assert kinds[source.incarnation] == kinds[target.incarnation]
    fitting = [name for name in fleets[0].incarnations if kinds[name] == kinds[target.incarnation]]
    assert source.incarnation not in avoid or all(name in avoid for name in fitting)
    assert not (last and source.incarnation in avoid)
    for leg in (decision.prefill, decision.decode):
        assert 0 <= leg.hit_tokens <= num_tokens


@settings(max_examples=200, deadline=None)
@given(
    role=st.sampled_from(["prefill", "decode"]),
    specs=st.lists(node, min_size=1, max_size=20),
    data=st.data(),
    num_tokens=st.integers(1, 3000),
    max_new_tokens=st.sampled_from([0, 50, 5000]),
)
def test_one_by_one_and_all_at_once_give_the_same_scores_and_the_same_pick(
    role: Role, specs: list[dict[str, Any]], data: st.DataObject, num_tokens: int, max_new_tokens: int
) -> None:
    made = fleet(role, specs, [0])
    slots = {name: slot for slot, name in enumerate(["elsewhere", *made.incarnations])}
    depths = data.draw(st.lists(st.integers(0, 40), min_size=len(made), max_size=len(made)))
    hits = PrefixHits(slots, len(slots), [(2 << row, depth) for row, depth in enumerate(depths) if depth])
    held, memory = made.hit_blocks(hits), Memory(turn=data.draw(st.integers(0, 50)))
    query = Query(num_tokens, hits=hits, max_new_tokens=max_new_tokens)
    one_by_one = kv_aware.score(made, query, memory)
    at_once = kv_aware.decode_s(made, query, held) if role == "decode" else kv_aware.prefill_s(made, query, held)
    assert one_by_one == at_once.tolist()
    for worked in data.draw(st.lists(st.sampled_from(made.incarnations), max_size=9)):
        made.sent(worked, tokens=0, blocks=0, work_s=0.1)
    for policy in POLICIES.values():
        assert picker.pick(policy, at_once, made, memory) == picker.pick(policy, at_once.tolist(), made, memory)
    names = picker.shown(made, at_once, None)
    assert names == picker.shown(made, at_once.tolist(), None)
    assert list(names.values())[:3] == list(picker.shown(made, at_once, 3).values())


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 500)), max_size=80))
def test_columns_follow_from_what_happened(steps: list[tuple[int, int, int]]) -> None:
    """Adding, dropping and counting in any order: rows stay with their nodes, derived columns with their sources."""
    made, model = Fleet("decode"), dict[str, dict[str, float]]()
    for action, number, amount in steps:
        name = f"i{number}"
        if action == 0 and name not in made:
            made.add(f"n{number % 3}", name, kv_kind="k", free_blocks=100.0)
            model[name] = {"tokens": 0.0, "reported": 0.0, "count": 0.0}
        elif action == 1:
            made.drop(name)
            model.pop(name, None)
        elif action == 2:
            made.sent(name, tokens=amount, blocks=1, work_s=0.1)
            if name in model:
                model[name]["tokens"] += amount
                model[name]["count"] += 1
        elif action == 3:
            made.update(name, queued_tokens=amount, waiting=2, running=1)
            if name in model:
                model[name]["reported"] = amount
        assert len(made) == len(model) == len(made.columns.load) == len(made.columns.recent_work)
        assert made.incarnations == [name for _, name in sorted(zip(made.node_ids, made.incarnations, strict=True))]
        for incarnation, expected in model.items():
            row = made.row(incarnation)
            assert row is not None
            assert made.incarnations[row] == incarnation
            at = made.node(incarnation)
            assert at.backlog == expected["tokens"] + expected["reported"]
            assert at.in_flight == expected["count"]
            assert at.room == 100 - expected["count"]
            assert at.requests == at.waiting + at.running + expected["count"]
            assert {name: getattr(made.columns, name)[row] for name in NAMES} == {
                name: getattr(at, name) for name in NAMES
            }, "columns are up to date whenever one asks"


@settings(max_examples=60, deadline=None)
@given(
    given_work=st.lists(st.tuples(st.integers(0, 3), st.floats(0.001, 100.0)), min_size=1, max_size=200),
    heavy=st.sampled_from([2.0, 1e3, 1e100]),
)
def test_recent_work_fades(given_work: list[tuple[int, float]], heavy: float) -> None:
    """As if every request reduced all older work by the same share, also if weights are rescaled in between."""
    made, expected = Fleet("prefill"), [0.0] * 4
    for number in range(4):
        made.add(f"n{number}", f"i{number}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "_HEAVY", heavy)
        for number, work_s in given_work * 8:
            made.sent(f"i{number}", tokens=1, blocks=1, work_s=work_s)
            expected[number] += work_s
            expected = [work * (1 - 1 / (200 * 4)) for work in expected]
    shown = [made.values(f"i{number}")["recent_work"] for number in range(4)]
    assert shown == pytest.approx(expected, rel=1e-9)
    assert made.columns.recent_work.tolist() == [node.recent_work for node in made.nodes]
