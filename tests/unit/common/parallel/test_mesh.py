"""Collectives among ranks: exact, in order, on the given address alone, and never hanging on a rank that is gone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from support.rank_processes import Case, Outcome, run_ranks
from support.system import wait_until

from common.parallel import futex
from common.parallel.gloo import PipelineLink
from common.parallel.mesh import SOLO
from common.parallel.nccl import NcclGroup

KINDS = [
    pytest.param(
        True,
        id="shared memory",
        marks=pytest.mark.skipif(not futex.AVAILABLE, reason="no all-reduce through shared memory on this platform"),
    ),
    pytest.param(False, id="gloo"),
]


def ok(outcomes: list[Outcome]) -> list[Outcome]:
    assert [o for o in outcomes if o.error or o.signal] == []
    return outcomes


def segments() -> set[Path]:
    return set(futex.SHM_DIR.glob("kvrelay-*"))


@pytest.mark.parametrize("same_host", KINDS)
def test_all_reduce_and_gather_are_exact_and_equal_on_all_ranks(same_host: bool) -> None:
    before = segments()
    sizes = ((2, 1, 1), (4, 1, 1), (3, 2, 1), (2, 1, 3), (2, 2, 2))
    cases = [Case(tp, pp, {"same_host": same_host}, cp=cp) for tp, pp, cp in sizes]
    for case, outcomes in zip(cases, run_ranks("support.rank_jobs:exchange", cases), strict=True):
        for rank, outcome in enumerate(ok(outcomes)):
            assert outcome.value["kind"] == ("SharedMemoryGroup" if same_host else "GlooGroup")
            assert outcome.value["bits"] == outcomes[rank - rank % case.tp].value["bits"]
            assert set(outcome.value["listens"]) <= {"127.0.0.1"}
            assert outcome.value["left"] == []
    appeared = segments() - before  # those of clusters beside this test go away by themselves
    wait_until(lambda: appeared.isdisjoint(segments()), 10, "no segment is left")


def test_hidden_states_arrive_in_order_with_several_in_flight() -> None:
    cases = [Case(tp, pp, {"messages": 50}) for tp, pp in ((1, 2), (2, 3))]
    for outcomes in run_ranks("support.rank_jobs:pipe", cases):
        ok(outcomes)


def test_a_stage_may_send_as_often_as_there_are_stages_before_the_next_receives() -> None:
    (outcomes,) = run_ranks("support.rank_jobs:sends_do_not_wait", [Case(1, 2)])
    assert ok(outcomes)[1].value == [0.0, 1.0]


@pytest.mark.parametrize("same_host", KINDS)
def test_a_rank_that_is_killed_is_reported_at_once(same_host: bool) -> None:
    arguments = {"how": signal.SIGKILL, "same_host": same_host, "timeout_s": 20.0}
    cases = [Case(tp, pp, {**arguments, "lost": lost}) for tp, pp, lost in ((2, 1, 0), (3, 1, 2), (1, 2, 1), (1, 3, 0))]
    for case, outcomes in zip(cases, run_ranks("support.rank_jobs:lose_a_rank", cases), strict=True):
        lost = case.arguments["lost"]
        assert outcomes[lost].signal == signal.SIGKILL
        for outcome in ok([o for rank, o in enumerate(outcomes) if rank != lost]):
            assert "rank" in outcome.value
            assert outcome.seconds < 10.0


@pytest.mark.parametrize("same_host", KINDS)
def test_a_rank_that_is_silent_is_reported_within_the_timeout(same_host: bool) -> None:
    arguments = {"how": signal.SIGSTOP, "same_host": same_host, "timeout_s": 2.0}
    cases = [Case(tp, pp, {**arguments, "lost": 1}) for tp, pp in ((2, 1), (1, 2))]
    for outcomes in run_ranks("support.rank_jobs:lose_a_rank", cases):
        assert outcomes[1].signal == signal.SIGSTOP
        (outcome,) = ok([outcomes[0]])
        assert "rank" in outcome.value
        assert outcome.seconds < 7.0


@pytest.mark.parametrize("same_host", KINDS)
def test_ranks_that_do_not_connect_are_named(same_host: bool) -> None:
    arguments = {"same_host": same_host, "timeout_s": 2.0}
    some, no_first = run_ranks(
        "support.rank_jobs:meet",
        [Case(2, 2, arguments, absent=(1, 3)), Case(2, 1, {**arguments, "timeout_s": 1.0}, absent=(0,))],
    )
    for outcome in some:
        assert outcome.error == "RankLost"
        assert outcome.seconds < 8.0
    assert "ranks 1, 3 did not connect to 127.0.0.1:" in some[0].message
    assert no_first[0].error == "RankLost"
    assert "rank 0 was not reachable" in no_first[0].message


def test_ranks_that_disagree_on_the_nodes_size_are_refused() -> None:
    (outcomes,) = run_ranks("support.rank_jobs:disagree", [Case(1, 2)])
    assert {outcome.error for outcome in outcomes} <= {"ConfigError", "RankLost"}
    assert any("layout differs" in outcome.message for outcome in outcomes)


def test_a_lone_rank_exchanges_nothing() -> None:
    marker = object()
    assert SOLO.all_reduce(marker) is marker  # pyright: ignore
    assert SOLO.gather_columns(marker) is marker  # pyright: ignore
    assert SOLO.place.world_size == 1


class Ended:
    """A group that notes how it is ended."""

    def __init__(self) -> None:
        self.how: list[str] = []

    def abort(self) -> None:
        self.how.append("abort")

    def shutdown(self) -> None:
        self.how.append("shutdown")


def test_closing_on_gpus_does_not_wait_for_pending_collectives() -> None:
    """One may be an all-reduce with a rank that was killed; NCCL's `shutdown` finishes it first."""
    summing, passing, by_gloo = Ended(), Ended(), Ended()
    NcclGroup(summing, 0, [0, 1]).close()
    PipelineLink(passing, 0, [0, 1], torch.device("cuda", 0)).close()
    PipelineLink(by_gloo, 0, [0, 1]).close()
    assert (summing.how, passing.how, by_gloo.how) == (["abort"], ["abort"], ["shutdown"])
