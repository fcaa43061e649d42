"""The transfers of a node: the orders that every rank gets, and what the leader makes of their reports."""

from __future__ import annotations

from typing import Any

import pytest
from support.transfer_harness import layout

from common.base.errors import PeerLost, TransferError
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    DisconnectOrder,
    OpenDestinationOrder,
    Opened,
    OpenSourceOrder,
    Received,
    SourceReleased,
    Traffic,
    TransferPlan,
)
from common.node import transfers as node_transfers
from common.node.transfers import NodeTransfers

KEY, OTHER = AttemptKey("r", 1), AttemptKey("s", 1)
PEER = PeerRef("decode-7", "inc-1", "", ["a", "b"])
SRC = PeerRef("prefill-3", "inc-9", "", [])


def plan(key: AttemptKey = KEY) -> TransferPlan:
    return TransferPlan(key, [[0]], [0], [b"h" * 16], 9.0)


class Silent:
    """An end that does nothing but remember its orders."""

    address = ""

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.apply = self.orders.append

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        pass

    def close(self) -> None:
        pass


class Node:
    """A node of two ranks, what it told them, and what it reported."""

    def __init__(self, world_size: int = 2) -> None:
        self.own = Silent()
        self.others: list[Any] = []
        self.events: list[Any] = []
        self.transfers = NodeTransfers(world_size, self.others.append, self.events.append, lambda _: self.own)


def test_leader_adds_up_what_all_ranks_moved_in_each_direction() -> None:
    node = Node()
    transfers = node.transfers
    for _ in range(2):
        transfers.open_source(plan())
        transfers.grant(Grant(KEY, PEER, layout(tp=2), [0], [pack_ids([0])]))
        for rank, transport in enumerate(("shm", "zmq")):
            moved = Traffic(rank, rank, transport, f"why {rank}", 100 + rank)
            transfers.on_event(SourceReleased(KEY, 100 + rank, traffic=(moved,)))
    assert [event.bytes_sent for event in node.events] == [201, 201]
    assert [sum(t.size_bytes for t in event.traffic) for event in node.events] == [201, 201]
    transfers.open_destination(plan(OTHER), SRC, layout())
    for rank in range(2):
        transfers.on_event(Received(OTHER, 7, (Traffic(rank, 0, "zmq", "", 7),)))
    assert [t.rank for t in node.events[-1].traffic] == [0, 1]
    rows = transfers.describe()
    assert [(r["peer"], r["ranks"], r["transport"], r["why"], r["bytes"], r["transfers"]) for r in rows] == [
        ("decode-7", "0 to 0", "shm", "why 0", 200, 2),
        ("decode-7", "1 to 1", "zmq", "why 1", 202, 2),
        ("prefill-3", "0 from 0", "zmq", "the sending node chose it", 7, 1),
        ("prefill-3", "1 from 0", "zmq", "the sending node chose it", 7, 1),
    ]


def test_only_the_latest_pairs_of_ranks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_transfers, "MAX_PAIRS", 3)
    transfers = Node(world_size=1).transfers
    for number in range(5):
        transfers.open_destination(plan(), PeerRef(f"n{number}", "i", "", []), layout())
        transfers.on_event(Received(KEY, 1, (Traffic(0, 0, "zmq", "", 1),)))
        transfers.on_event(DestinationReleased(KEY))
    assert [row["peer"] for row in transfers.describe()] == ["n2", "n3", "n4"]


def test_opening_a_live_attempt_again_in_either_direction_is_refused_before_any_rank_hears_of_it() -> None:
    node = Node()
    node.transfers.open_source(plan())
    node.transfers.open_destination(plan(OTHER), SRC, layout())
    for key in (KEY, OTHER):
        with pytest.raises(TransferError, match="open already"):
            node.transfers.open_source(plan(key))
        with pytest.raises(TransferError, match="open already"):
            node.transfers.open_destination(plan(key), SRC, layout())
    assert (
        node.others
        == node.own.orders
        == [
            OpenSourceOrder(plan()),
            OpenDestinationOrder(plan(OTHER), SRC, layout()),
        ]
    )


def test_every_rank_disconnects_from_a_node_that_cannot_be_reached() -> None:
    node = Node()
    node.transfers.disconnect("inc-3")
    assert node.others == node.own.orders == [DisconnectOrder("inc-3")]


def test_grant_waits_until_every_rank_expects_slices() -> None:
    node, single = Node(), Node(world_size=1)
    assert single.transfers.open_destination(plan(), SRC, layout()), "a node of one rank grants at once"
    single.transfers.on_event(Opened(KEY))
    assert not single.events
    assert not node.transfers.open_destination(plan(), SRC, layout())
    node.transfers.on_event(Opened(KEY))
    assert not node.events
    node.transfers.on_event(Opened(KEY))
    assert node.events == [Opened(KEY)]


def test_attempt_is_released_when_its_last_rank_has_released_it() -> None:
    node = Node()
    node.transfers.open_destination(plan(), SRC, layout())
    node.transfers.on_event(DestinationReleased(KEY))
    assert not node.events
    node.transfers.on_event(DestinationReleased(KEY))
    assert node.events == [DestinationReleased(KEY)]
    node.transfers.open_destination(plan(), SRC, layout())


def test_first_failure_of_a_rank_aborts_the_others_and_is_the_nodes_error() -> None:
    node = Node()
    node.transfers.open_source(plan())
    node.transfers.on_event(SourceReleased(KEY, 3, PeerLost("rank 1: gone")))
    assert node.others[1:] == [AbortOrder(KEY)]
    node.transfers.on_event(SourceReleased(KEY, 4, TransferError("rank 0: aborted")))
    [released] = node.events
    assert (released.bytes_sent, str(released.error)) == (7, "rank 1: gone")
    assert len(node.others) == 2
