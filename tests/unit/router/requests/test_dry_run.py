"""The dry run of a routing decision: what `place` would do, every candidate named, nothing remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.policy import POLICIES, Fleet, Memory, Query, Routing, place
from router.requests.admission import Objectives
from router.requests.dry_run import dry_run


def fleets(count: int = 4) -> tuple[Fleet, Fleet]:
    prefill, decode = Fleet("prefill"), Fleet("decode")
    for fleet, letter in ((prefill, "p"), (decode, "d")):
        for index in range(count):
            fleet.add(
                f"{letter}{index}", f"{letter}{index}-inc", waiting=index, running=count - index, total_blocks=100
            )
    return prefill, decode


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_it_says_what_place_decides_and_leaves_the_memory_alone(policy: str) -> None:
    prefill, decode = fleets()
    memory = Memory(turn=5)
    query = Query(400, hits={"p2-inc": 3, "d1-inc": 1})
    for _ in range(6):
        told = dry_run(query, prefill, decode, Routing(POLICIES[policy], 32, memory), Objectives())
        assert told == dry_run(query, prefill, decode, Routing(POLICIES[policy], 32, memory), Objectives())
        made = place(query, prefill, decode, Routing(POLICIES[policy], 32, memory))
        assert (told["mode"], told["reason"]) == (made.mode, made.reason)
        assert told["decode"][0]["node"] == made.decode.node_id
        assert told["decode"][0]["picked"]
        if made.prefill is not None:
            assert told["prefill"][0]["node"] == made.prefill.node_id
        assert {row["node"] for row in told["prefill"]} == {"p0", "p1", "p2", "p3"}
        assert {row["node"]: row["hit_tokens"] for row in told["prefill"]}["p2"] == 48
        assert sum(row["picked"] for row in told["decode"]) == 1


def test_avoided_nodes_and_empty_fleets_are_shown_as_such() -> None:
    prefill, decode = fleets(2)
    query = Query(400, avoid=frozenset({"d0-inc"}))
    told = dry_run(query, prefill, decode, Routing(POLICIES["least_load"], 32, Memory()), Objectives())
    assert {row["node"]: row["avoided"] for row in told["decode"]} == {"d0": True, "d1": False}
    assert told["decode"][0]["node"] == "d1"
    nobody = dry_run(query, prefill, Fleet("decode"), Routing(POLICIES["least_load"], 32, Memory()), Objectives())
    assert (nobody["mode"], nobody["decode"]) == (None, [])
    assert "no decode node" in nobody["reason"]
    assert len(nobody["prefill"]) == 2


def test_it_says_whether_the_request_would_wait_or_be_refused() -> None:
    prefill, decode = fleets(2)

    def admission(objectives: Objectives | None = None, queued: int = 0) -> str:
        routing = Routing(POLICIES["kv_aware"], 32, Memory())
        told = dry_run(Query(400), prefill, decode, routing, objectives or Objectives(), queued)
        return told["admission"]

    assert admission() == "at once"
    assert admission(queued=3) == "waits: others wait before it"
    for fleet in (prefill, decode):
        fleet.costs = replace(fleet.costs, prefills=50)
    assert admission(objectives=Objectives(ttft_s=1e-4)).startswith("refused: the first token would take about")
    for incarnation in decode.incarnations:
        decode.update(incarnation, waiting=500)
    assert "every decode node has more requests than it can run" in admission()
