"""Routing policies."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from common.base.errors import ConfigError, Unavailable
from common.control.messages import NodeLoad, Role
from router.policy import POLICIES, Decision, Fleet, Memory, Query, Routing, find_policy, place
from router.policy.fleet import ANY_CONTEXT


@dataclass
class Node:
    name: str
    kv_kind: str
    context: int
    values: dict[str, float]


def node(name: str, kv_kind: str = "", context: int = ANY_CONTEXT, **values: float) -> Node:
    return Node(name, kv_kind, context, values)


def fleet(role: Role, nodes: list[Node]) -> Fleet:
    made = Fleet(role)
    for each in nodes:
        made.add(each.name, f"inc-{each.name}", kv_kind=each.kv_kind, context=each.context, **each.values)
    return made


def decide(
    prefill: list[Node], decode: list[Node], *, policy: str = "least_load", local: int | None = 32, **query: object
) -> Decision:
    return place(
        Query(**{"num_tokens": 1000, **query}),  # type: ignore[arg-type]
        fleet("prefill", prefill),
        fleet("decode", decode),
        Routing(POLICIES[policy], local, Memory()),
    )


def test_waiting_weighs_four_times_running_and_unreported_work_counts() -> None:
    nodes = [node("a", waiting=1), node("b", running=3), node("c", running=2, in_flight=2)]
    assert decide(nodes, nodes).decode.node_id == "b"
    assert decide(nodes, nodes).decode.scores == {"a": 4, "b": 3, "c": 4}


def test_equal_load_is_decided_by_queued_tokens() -> None:
    nodes = [node("a", queued_tokens=500), node("b", queued_tokens=10)]
    decision = decide(nodes, [node("d")])
    assert decision.prefill is not None
    assert decision.prefill.node_id == "b"


def source(prefill: list[Node], decode: list[Node], **query: object) -> str | None:
    decision = decide(prefill, decode, **query)
    return None if decision.prefill is None else decision.prefill.node_id


def test_a_prefill_node_gets_only_what_its_context_takes() -> None:
    """It would refuse the request, or end the answer with the first token that fills its context."""
    short, long, decode = node("a", context=1001), node("b", context=4096, running=5), [node("d", context=4096)]
    assert source([short, long], decode, max_new_tokens=1) == "a"
    assert source([short, long], decode, max_new_tokens=9) == "b"
    assert source([short, long], decode, num_tokens=1001, max_new_tokens=1) == "b"
    assert source([short], decode, max_new_tokens=9) is None
    assert source([short], decode, max_new_tokens=9, avoid=frozenset({"inc-a"})) is None
    decision = decide([short], decode, max_new_tokens=9)
    assert (decision.mode, decision.reason) == ("local", "no prefill node takes 1000 tokens")


def test_a_decode_node_whose_context_takes_the_whole_answer_is_preferred_even_if_it_failed() -> None:
    short, long = node("a", context=1500), node("b", context=2000, running=5)
    assert decide([], [short, long], max_new_tokens=500).decode.node_id == "a"
    assert decide([], [short, long], max_new_tokens=501).decode.node_id == "b"
    again = decide([], [short, long], max_new_tokens=501, avoid=frozenset({"inc-b"}))
    assert again.decode.node_id == "b"
    assert decide([], [short], max_new_tokens=501).decode.node_id == "a", "there is no other"


def test_a_decode_node_gets_only_what_its_context_takes_even_if_it_is_the_only_one() -> None:
    short, long = node("a", context=1000), node("b", context=2000, running=60)
    assert decide([], [short, long], max_new_tokens=1).decode.node_id == "b"
    assert decide([], [short, long], max_new_tokens=1, avoid=frozenset({"inc-b"})).decode.node_id == "b"
    with pytest.raises(Unavailable, match="no decode node takes 1000 tokens now"):
        decide([], [short], max_new_tokens=1)


def test_an_answer_without_a_limit_counts_with_the_usual_length() -> None:
    """Otherwise every request without `max_tokens` would go to the largest nodes."""
    short, long = node("a", context=1500), node("b", context=9000, running=5)
    assert decide([], [short, long], max_new_tokens=8000).decode.node_id == "b"
    assert decide([], [short, long], max_new_tokens=8000, open_ended=True).decode.node_id == "a"


def test_an_answer_goes_on_where_the_kv_means_what_it_did() -> None:
    decodes = [node("a", "new"), node("b", "old", running=9), node("c", "old", running=5)]
    assert decide([], decodes).decode.node_id == "a"
    assert decide([], decodes, kv_kind="old").decode.node_id == "c"
    assert decide([], decodes, kv_kind="old", avoid=frozenset({"inc-c"})).decode.node_id == "b"
    assert decide([], decodes, kv_kind="gone").decode.node_id == "a", "there is no other"


@pytest.mark.parametrize("policy", ["least_load", "round_robin", "random"])
def test_idle_nodes_share_requests_evenly(policy: str) -> None:
    memory = Memory(random.Random(1))
    nodes = [node("a"), node("b"), node("c")]
    prefill, decode = fleet("prefill", nodes), fleet("decode", nodes)
    counts = Counter(
        place(Query(1000), prefill, decode, Routing(POLICIES[policy], 0, memory)).decode.node_id for _ in range(300)
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
    assert decision.explain()["mode"] == mode
    if avoid and decision.prefill is not None:
        assert decision.prefill.node_id == prefill[-1].name


def test_last_attempt_rather_does_without_a_relay_than_with_the_node_that_failed() -> None:
    assert decide([node("p")], [node("d")], avoid=frozenset({"inc-p"}), last=True).mode == "local"
    assert decide([node("p"), node("q")], [node("d")], avoid=frozenset({"inc-p"}), last=True).mode == "relayed"


def test_decode_node_that_failed_is_used_again_only_if_it_is_the_last_one() -> None:
    avoid = frozenset({"inc-a"})
    assert decide([], [node("a"), node("b", running=50)], avoid=avoid).decode.node_id == "b"
    assert decide([], [node("a")], avoid=avoid).decode.node_id == "a"


def test_no_decode_node_is_unavailable_and_an_unknown_policy_names_the_known() -> None:
    with pytest.raises(Unavailable):
        decide([node("p")], [])
    with pytest.raises(ConfigError, match="least_load"):
        find_policy("fastest")


def test_the_only_decode_node_computes_the_prompt_itself_after_a_relay_to_it_failed() -> None:
    """A prefill node that cannot reach it would lose the next attempt in the same way."""
    decision = decide([node("p0")], [node("d0")], avoid=frozenset({"inc-d0"}))
    assert (decision.mode, decision.decode.node_id) == ("local", "d0")


def test_the_reason_says_what_the_other_choice_would_cost() -> None:
    decode = [node("d", running=50)]
    far = decide([node("p", queued_tokens=50_000, waiting=9)], [node("d")], policy="kv_aware", local=None)
    assert (far.mode, far.reason.split(" would cost ")[0]) == ("local", "relaying 1000 tokens")
    near = decide([node("p")], decode, policy="kv_aware", local=None)
    assert (near.mode, near.reason.split(" would cost ")[0]) == ("relayed", "computing 1000 tokens on the decode node")
    assert re.search(r" [\d.e+]+ ms more \([\d.e+]+ against [\d.e+]+, the delay of others included\)$", near.reason)


def lead(name: str, blocks: int) -> dict[str, int]:
    return {f"inc-{name}": blocks}


def source_of(decision: Decision) -> str:
    assert decision.prefill is not None, decision.reason
    return decision.prefill.node_id


def test_kv_aware_goes_where_the_prefix_is_until_queueing_costs_more_than_computing() -> None:
    busy = [node("a", queued_tokens=2000, waiting=2), node("b")]
    decode = [node("d", running=50)]
    hit = lead("a", 62)
    assert source_of(decide(busy, decode, policy="kv_aware", hits=hit)) == "a"
    assert source_of(decide(busy, decode, policy="kv_aware")) == "b"
    hot = [node("a", queued_tokens=20_000, waiting=3), node("b")]
    assert source_of(decide(hot, decode, policy="kv_aware", hits=hit)) == "b", "a second holder rather than a queue"


def test_kv_aware_spreads_a_crowd_with_one_prefix() -> None:
    """A burst of 200 that all have the same long prefix, over 4 + 4 nodes; only the first ones find it on one node."""
    prefill = fleet("prefill", [node(f"p{n}") for n in range(4)])
    decode = fleet("decode", [node(f"d{n}", total_blocks=1e5, free_blocks=1e5) for n in range(4)])
    hits, memory, counts = dict[str, int](), Memory(random.Random(0)), Counter[str]()
    for _ in range(200):
        query = Query(1000, hits=dict(hits), max_new_tokens=16)
        decision = place(query, prefill, decode, Routing(POLICIES["kv_aware"], 0, memory))
        for made, leg in ((prefill, decision.prefill), (decode, decision.decode)):
            assert leg is not None
            counts[leg.node_id] += 1
            hits[leg.incarnation] = 62
            made.sent(leg.incarnation, tokens=1000 - leg.hit_tokens, blocks=64, work_s=leg.work_s)
    for role in "pd":
        assert max(counts[f"{role}{n}"] for n in range(4)) <= 1.3 * 50, counts


def test_kv_aware_computes_on_the_decode_node_what_is_cheaper_there() -> None:
    fleets = fleet("prefill", [node("p")]), fleet("decode", [node("d")])

    def mode(num_tokens: int, hits: dict[str, int] | None = None, **load: float) -> str:
        fleets[1].update("inc-d", running=load.get("running", 0.0))
        fleets[0].update("inc-p", queued_tokens=load.get("queued", 0.0))
        query = Query(num_tokens, hits=hits or {})
        return place(query, *fleets, Routing(POLICIES["kv_aware"], None, Memory())).mode

    assert mode(20) == "local"
    assert mode(1000) == "relayed"
    assert mode(1000, lead("d", 62)) == "local"
    assert mode(1000, queued=90_000) == "local", "the prefill node has a long queue"
    assert mode(20, running=60) == "relayed", "sixty streams would wait for it"


def test_decode_node_has_room_for_the_whole_sequence() -> None:
    full = node("full", running=1, total_blocks=1000, free_blocks=10)
    roomy = node("roomy", running=20, total_blocks=1000, free_blocks=500)
    tight = node("tight", running=1, total_blocks=1000, free_blocks=70)
    assert decide([], [full, roomy], policy="kv_aware").decode.node_id == "roomy"
    assert decide([], [full, tight], policy="kv_aware").decode.node_id == "tight"
    assert decide([], [tight, node("x", running=1, total_blocks=1000, free_blocks=500)], policy="kv_aware",
                  max_new_tokens=900).decode.node_id == "x"  # fmt: skip


@pytest.mark.parametrize("count", [1, 70])
def test_a_decode_node_that_reports_no_blocks_has_no_room(count: int) -> None:
    decode = fleet("decode", [node(f"d{index}") for index in range(count)])
    for incarnation in decode.incarnations:
        decode.reported(incarnation, NodeLoad(running=1), in_flight=0, in_flight_tokens=0.0, in_flight_blocks=0.0)
    decision = place(Query(100), Fleet("prefill"), decode, Routing(POLICIES["kv_aware"], None, Memory()))
    assert decision.mode == "local"


def test_decode_node_that_holds_the_prefix_is_preferred_among_equals() -> None:
    decode = [node("a", token_bytes=1e5), node("b", token_bytes=1e5)]
    assert decide([node("p")], decode, policy="kv_aware", hits=lead("b", 60)).decode.node_id == "b"


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    nodes = [node(f"n{index}", running=index) for index in range(8)]
    made, memory, counts = fleet("decode", nodes), Memory(random.Random(0)), Counter[str]()
    for _ in range(400):
        decision = place(
            Query(10),
            fleet("prefill", []),
            made,
            Routing(POLICIES["power_of_two"], 0, memory),
        )
        assert len(decision.decode.scores) == 2
        counts[decision.decode.node_id] += 1
    assert counts["n7"] == 0
    assert counts["n0"] > 60


def session_node(made: Fleet, session: str) -> str:
    query = Query(10, session=session)
    decision = place(query, fleet("prefill", []), made, Routing(POLICIES["session"], 0, Memory()))
    return decision.decode.node_id


def test_sessions_stay_when_nodes_come_and_go_and_spill_when_theirs_is_full() -> None:
    made = fleet("decode", [node(f"n{index}") for index in range(10)])
    names = [f"session-{index}" for index in range(500)]
    before = {name: session_node(made, name) for name in names}
    share = Counter(before.values())
    assert max(share.values()) < 2 * 50
    made.drop("inc-n3")
    without = {name: session_node(made, name) for name in names}
    assert all(without[name] == node_id for name, node_id in before.items() if node_id != "n3"), "only its own move"
    made.add("n3", "inc-n3b")
    assert {name: session_node(made, name) for name in names} == before, "a restart keeps the node's sessions"
    made.update("inc-n5", running=40)
    moved = {name for name in names if session_node(made, name) != before[name]}
    assert moved == {name for name in names if before[name] == "n5"}


def test_a_decision_that_is_too_long_loses_its_worst_candidates_and_stays_json() -> None:
    nodes = [node(f"node-{'x' * 50}-{number}", running=number) for number in range(8)]
    decision = decide(nodes, nodes)
    whole = decision.weighed()
    assert decision.weighed(len(whole)) == whole
    cut = decision.weighed(len(whole) - 1)
    assert len(cut) < len(whole)
    kept = list(json.loads(cut)["decode"]["scores"])
    assert kept == list(decision.decode.scores)[:7]
    assert json.loads(decision.weighed(300))["decode"]["scores"] == {}
    assert decision.weighed(60) == "{}"


@pytest.mark.parametrize("policy", ["kv_aware", "least_load"])
def test_a_decision_as_json_is_what_an_encoder_would_write(policy: str) -> None:
    nodes = [node('odd "name" \\ \u00e9\n', running=3), node("n", waiting=1, slowness=1e-9)]
    for prefill in ([], nodes):
        decision = replace(decide(prefill, nodes, policy=policy), ttft_s=1e-7, tpot_s=12345.67891)
        told = decision.explain()
        assert list(told)[:3] == ["policy", "mode", "reason"]
        weighed = {name: told[name] for name in list(told)[3:]}
        assert json.dumps(weighed, separators=(",", ":")) == decision.weighed()
        for leg, choice in (("prefill", decision.prefill), ("decode", decision.decode)):
            if choice is not None:
                picked, scores = choice, {name: float(f"{score:.6g}") for name, score in choice.scores.items()}
                expected = {"node": picked.node_id, "hit": picked.hit_tokens, "scores": scores}
                assert decision.explain()[leg] == expected
        figures = {
            "policy": policy,
            "mode": decision.mode,
            "reason": decision.reason,
            "ttft_s": 1e-7,
            "tpot_s": 12345.7,
        }
        assert decision.explain() | figures == decision.explain()
