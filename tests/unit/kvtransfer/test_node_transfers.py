"""One transfer over all ranks of a node: what the leader adds up, and what the other ranks do and report."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.transfer_harness import layout

from common.base.errors import CorruptSlice, PeerLost, TransferError
from common.control.ids import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    AbortOrder,
    IncomingTransfer,
    OpenDestinationOrder,
    Opened,
    OutgoingTransfer,
    Received,
    ReceiveFailed,
    SourceReleased,
    Traffic,
)
from kvtransfer.node_transfers import NodeReceiver, NodeSender, RankReceiver, RankSender

KEY = AttemptKey("r", 1)
PEER = PeerRef("decode-7", "inc-1", "", ["a", "b"])
OUTGOING = OutgoingTransfer(KEY, "i", [[0]], [0], [b"h" * 16], 4, 9.0)
INCOMING = IncomingTransfer(KEY, PEER, layout(), [[0]], [b"h" * 16], [0], 9.0)


class Silent:
    """An end that does nothing of itself."""

    address = ""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_leader_adds_up_what_all_ranks_sent() -> None:
    events: list[Any] = []
    sender = NodeSender(2, lambda order: None, events.append, lambda on_event: Silent())  # type: ignore[arg-type]
    for _ in range(2):
        sender.open(OUTGOING)
        sender.grant(Grant(KEY, PEER, layout(tp=2), [0], [pack_ids([0])]))
        for rank, transport in enumerate(("shm", "zmq")):
            moved = Traffic(rank, rank, transport, f"why {rank}", 100 + rank)
            sender.on_event(SourceReleased(KEY, 100 + rank, traffic=(moved,)))
    assert [event.bytes_sent for event in events] == [201, 201]
    assert [sum(t.size_bytes for t in event.traffic) for event in events] == [201, 201]
    rows = sender.describe()
    assert [(r["peer"], r["ranks"], r["transport"], r["why"], r["bytes"], r["transfers"]) for r in rows] == [
        ("decode-7", "0 to 0", "shm", "why 0", 200, 2),
        ("decode-7", "1 to 1", "zmq", "why 1", 202, 2),
    ]


def test_leader_adds_up_what_all_ranks_received() -> None:
    events: list[Any] = []
    receiver = NodeReceiver(2, lambda order: None, events.append, lambda on_event: Silent())  # type: ignore[arg-type]
    src = PeerRef("prefill-3", "inc-9", "", [])
    receiver.open(IncomingTransfer(KEY, src, layout(), [[0]], [b"h" * 16], [0], 9.0))
    for rank in range(2):
        receiver.on_event(Received(KEY, 7, (Traffic(rank, 0, "zmq", "", 7),)))
    assert [row["peer"] for row in receiver.describe()] == ["prefill-3", "prefill-3"]
    assert [row["ranks"] for row in receiver.describe()] == ["0 from 0", "1 from 0"]
    assert [t.rank for t in events[-1].traffic] == [0, 1]


def test_opening_a_live_attempt_again_is_refused_before_any_rank_hears_of_it() -> None:
    orders: list[Any] = []
    for kind, transfer in ((NodeSender, OUTGOING), (NodeReceiver, INCOMING)):
        end: Any = kind(2, orders.append, lambda _: None, lambda _: Silent())  # type: ignore[arg-type]
        end.open(transfer)
        end.on_event(Opened(KEY) if kind is NodeReceiver else SourceReleased(KEY, 0))
        with pytest.raises(TransferError, match="open already"):
            end.open(transfer)
        assert end._open[KEY].opened + end._open[KEY].released == 2, "what the ranks said stays"
    assert len(orders) == 2


def test_every_rank_disconnects_from_a_node_that_cannot_be_reached() -> None:
    ends: list[list[str]] = [[], []]

    def rank(number: int) -> Any:
        return SimpleNamespace(disconnect=ends[number].append, blocks_final=None)

    other = RankSender(1, lambda event: None, lambda _: rank(1))
    sender = NodeSender(2, other.apply, lambda _: None, lambda _: rank(0))
    sender.disconnect("inc-3")
    assert ends == [["inc-3"], ["inc-3"]]


def test_first_failure_of_a_rank_aborts_the_others_and_is_the_nodes_error() -> None:
    orders: list[Any] = []
    events: list[Any] = []
    sender = NodeSender(2, orders.append, events.append, lambda on_event: Silent())  # type: ignore[arg-type,return-value]
    sender.open(OUTGOING)
    sender.on_event(SourceReleased(KEY, 3, PeerLost("rank 1: gone")))
    assert orders[1:] == [AbortOrder(KEY)]
    sender.on_event(SourceReleased(KEY, 4, TransferError("rank 0: aborted")))
    [released] = events
    assert (released.bytes_sent, str(released.error)) == (7, "rank 1: gone")
    assert len(orders) == 2


def test_errors_name_their_rank_and_keep_their_type() -> None:
    reported: list[Any] = []
    callbacks: list[Any] = []

    def make(on_event: Any) -> Any:
        callbacks.append(on_event)
        return Silent()

    RankSender(3, reported.append, make)
    NodeReceiver(1, lambda order: None, reported.append, make).open(INCOMING)
    callbacks[0](SourceReleased(KEY, 0, OSError("no route")))
    callbacks[1](ReceiveFailed(KEY, CorruptSlice("hash differs")))
    assert [(type(event.error), str(event.error)) for event in reported] == [
        (TransferError, "rank 3: no route"),
        (CorruptSlice, "rank 0: hash differs"),
    ]


def test_rank_reports_that_a_transfer_is_open_before_anything_else_of_it() -> None:
    reported: list[Any] = []

    class ReceivesAtOnce(Silent):
        """Reports from another thread as soon as it is open."""

        def __init__(self, on_event: Any) -> None:
            self._report = threading.Thread(target=on_event, args=(Received(KEY, 7),))

        def open(self, transfer: IncomingTransfer) -> None:
            self._report.start()
            self._report.join(0.05)

        def close(self) -> None:
            self._report.join()

    rank = RankReceiver(1, reported.append, ReceivesAtOnce)  # type: ignore[arg-type]
    rank.apply(OpenDestinationOrder(INCOMING))
    rank.close()
    assert reported == [Opened(KEY), Received(KEY, 7)]
