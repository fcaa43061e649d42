"""Routing policies."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from common.errors import ConfigError, Unavailable
from common.protocol import Role
from router.policy import Decision, Fleet, Memory, Query, check_policy, place


@dataclass
class Node:
    name: str
    kv_kind: str
    values: dict[str, float]


def node(name: str, kv_kind: str = "", **values: float) -> Node:
    return Node(name, kv_kind, values)


def fleet(role: Role, nodes: list[Node]) -> Fleet:
    made = Fleet(role)
    for each in nodes:
        made.add(each.name, f"inc-{each.name}", kv_kind=each.kv_kind, **each.values)
    return made


def decide(prefill: list[Node], decode: list[Node], *, policy: str = "least_load", **query: object) -> Decision:
    return place(
        Query(**{"num_tokens": 1000, **query}),  # type: ignore[arg-type]
        fleet("prefill", prefill),
        fleet("decode", decode),
        policy=policy,
        local_prefill_tokens=32,
        memory=Memory(),
    )


def test_waiting_weighs_four_times_running_and_unreported_work_counts() -> None:
    nodes = [node("a", waiting=1), node("b", running=3), node("c", running=2, in_flight=2)]
    assert decide(nodes, nodes).decode.picked.node_id == "b"
    assert decide(nodes, nodes).decode.scores == {"a": 4, "b": 3, "c": 4}


def test_equal_load_is_decided_by_queued_tokens() -> None:
    nodes = [node("a", queued_tokens=500), node("b", queued_tokens=10)]
    decision = decide(nodes, [node("d")])
    assert decision.prefill is not None
    assert decision.prefill.picked.node_id == "b"


@pytest.mark.parametrize("policy", ["least_load", "round_robin", "random"])
def test_idle_nodes_share_requests_evenly(policy: str) -> None:
    memory = Memory(random.Random(1))
    nodes = [node("a"), node("b"), node("c")]
    prefill, decode = fleet("prefill", nodes), fleet("decode", nodes)
    counts = Counter(
        place(Query(1000), prefill, decode, policy=policy, local_prefill_tokens=0, memory=memory).decode.picked.node_id
        for _ in range(300)
    )
    assert max(counts.values()) - min(counts.values()) <= (60 if policy == "random" else 0)


@pytest.mark.parametrize(
    ("num_tokens", "prefill", "hit", "avoid", "mode"),
    [
        (32, [node("p")], 0, set[str](), "local"),
        (33, [node("p")], 0, set[str](), "relayed"),
        (1000, [node("p")], 992, set[str](), "local"),
        (1000, [], 0, set[str](), "local"),
        (1000, [node("p", kv_kind="other")], 0, set[str](), "local"),
        (1000, [node("p")], 0, {"inc-p"}, "relayed"),
        (1000, [node("p"), node("q")], 0, {"inc-p"}, "relayed"),
    ],
)
def test_relay_only_where_it_pays_and_can_work(
    num_tokens: int, prefill: list[Node], hit: int, avoid: set[str], mode: str
) -> None:
    decision = decide(prefill, [node("d")], num_tokens=num_tokens, avoid=frozenset(avoid), hits={"inc-d": hit // 16})
    assert decision.mode == mode
    assert decision.reason
    assert json.loads(decision.to_json())["mode"] == mode
    if avoid and decision.prefill is not None:
        assert decision.prefill.picked.node_id == prefill[-1].name


def test_last_attempt_rather_does_without_a_relay_than_with_the_node_that_failed() -> None:
    assert decide([node("p")], [node("d")], avoid=frozenset({"inc-p"}), last=True).mode == "local"
    assert decide([node("p"), node("q")], [node("d")], avoid=frozenset({"inc-p"}), last=True).mode == "relayed"


def test_decode_node_that_failed_is_used_again_only_if_it_is_the_last_one() -> None:
    avoid = frozenset({"inc-a"})
    assert decide([], [node("a"), node("b", running=50)], avoid=avoid).decode.picked.node_id == "b"
    assert decide([], [node("a")], avoid=avoid).decode.picked.node_id == "a"


def test_no_decode_node_is_unavailable_and_an_unknown_policy_names_the_known() -> None:
    with pytest.raises(Unavailable):
        decide([node("p")], [])
    with pytest.raises(ConfigError, match="least_load"):
        check_policy("fastest")


def test_the_only_decode_node_computes_the_prompt_itself_after_a_relay_to_it_failed() -> None:
    """A prefill node that cannot reach it would lose the next attempt in the same way."""
    decision = decide([node("p0")], [node("d0")], avoid=frozenset({"inc-d0"}))
    assert (decision.mode, decision.decode.picked.node_id) == ("local", "d0")
