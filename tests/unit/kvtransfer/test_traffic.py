"""What a node tells of its relays: which ranks, over what, why, how much; also over several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support import transport_ends
from support.transfer_harness import Cluster, layout

from common.base.errors import TransferError
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import IncomingTransfer, OutgoingTransfer, Received, SourceReleased, Traffic
from kvtransfer.node_transfers import NodeReceiver, NodeSender, TransferReport, apply
from kvtransfer.traffic import MAX_PAIRS, TrafficLog

KEY = AttemptKey("r", 1)
PEER = PeerRef("decode-7", "inc-1", "", ["a", "b"])


def test_both_ends_report_the_bytes_of_every_pair() -> None:
    cluster = Cluster(transport_ends.loopback(), layout(tp=2), layout(tp=1, pp=(3, 1)))
    try:
        transfer = cluster.transfer(tokens=16)
        transfer.run()
        sent = [t for rank in cluster.senders for t in rank.recorder.wait(transfer.key, SourceReleased).traffic]
        received = [t for rank in cluster.receivers for t in rank.recorder.wait(transfer.key, Received).traffic]
    finally:
        cluster.close()
    layer_bytes = cluster.dst_layout.bytes_per_block * 4 // 4 // 2
    expected = {(0, 0): 3 * layer_bytes, (0, 1): layer_bytes, (1, 0): 3 * layer_bytes, (1, 1): layer_bytes}
    assert {(t.rank, t.peer_rank): t.size_bytes for t in sent} == expected
    assert {(t.peer_rank, t.rank): t.size_bytes for t in received} == expected
    assert all(t.transport == "loopback" and t.why for t in sent)


class Silent:
    """An end that does nothing of itself."""

    address = ""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_leader_adds_up_what_all_ranks_sent() -> None:
    events: list[Any] = []
    sender = NodeSender(2, lambda order: None, events.append, lambda on_event: Silent())  # type: ignore[arg-type]
    for _ in range(2):
        sender.open(OutgoingTransfer(KEY, "src", [0], [b"h" * 16], 4, 9.0))
        sender.grant(Grant(KEY, PEER, layout(tp=2), 0, [0]))
        for rank, transport in enumerate(("shm", "zmq")):
            moved = Traffic(rank, rank, transport, f"why {rank}", 100 + rank)
            sender.on_report(
                TransferReport(rank, "SourceReleased", KEY, 100 + rank, traffic=(moved,)),
            )
    assert [event.bytes_sent for event in events] == [201, 201]
    assert [sum(t.size_bytes for t in event.traffic) for event in events] == [201, 201]
    rows = sender.traffic.describe()
    assert [(r["peer"], r["ranks"], r["transport"], r["why"], r["bytes"], r["transfers"]) for r in rows] == [
        ("decode-7", "0 to 0", "shm", "why 0", 200, 2),
        ("decode-7", "1 to 1", "zmq", "why 1", 202, 2),
    ]


def test_leader_adds_up_what_all_ranks_received() -> None:
    events: list[Any] = []
    receiver = NodeReceiver(2, lambda order: None, events.append, lambda on_event: Silent())  # type: ignore[arg-type]
    src = PeerRef("prefill-3", "inc-9", "", [])
    receiver.open(IncomingTransfer(KEY, src, layout(), [0], [b"h" * 16], 0, 9.0))
    for rank in range(2):
        receiver.on_report(TransferReport(rank, "Received", KEY, 7, traffic=(Traffic(rank, 0, "zmq", "", 7),)))
    assert [row["peer"] for row in receiver.traffic.describe()] == ["prefill-3", "prefill-3"]
    assert [row["ranks"] for row in receiver.traffic.describe()] == ["0 from 0", "1 from 0"]
    assert [t.rank for t in events[-1].traffic] == [0, 1]


def test_opening_a_live_attempt_again_is_refused_before_any_rank_hears_of_it() -> None:
    orders: list[Any] = []
    outgoing = OutgoingTransfer(KEY, "i", [0], [b"h" * 16], 4, 9.0)
    incoming = IncomingTransfer(KEY, PEER, layout(), [0], [b"h" * 16], 0, 9.0)
    for kind, transfer in ((NodeSender, outgoing), (NodeReceiver, incoming)):
        end: Any = kind(2, orders.append, lambda _: None, lambda _: Silent())  # type: ignore[arg-type]
        end.open(transfer)
        end.on_report(TransferReport(1, "Opened" if kind is NodeReceiver else "SourceReleased", KEY))
        with pytest.raises(TransferError, match="open already"):
            end.open(transfer)
        assert end._open[KEY].opened + end._open[KEY].reports == 2, "what the ranks said stays"
    assert len(orders) == 2


def test_every_rank_disconnects_from_a_node_that_cannot_be_reached() -> None:
    ends: list[list[str]] = [[], []]

    def rank(number: int) -> Any:
        return SimpleNamespace(disconnect=ends[number].append)

    sender = NodeSender(2, lambda order: apply(rank(1), order), lambda _: None, lambda _: rank(0))
    sender.disconnect("inc-3")
    assert ends == [["inc-3"], ["inc-3"]]


def test_log_is_bounded_and_keeps_the_latest() -> None:
    log = TrafficLog("to")
    for number in range(MAX_PAIRS + 5):
        log.add(f"n{number}", "i", [Traffic(0, 0, "zmq", "", 1)])
    assert len(log.pairs) == MAX_PAIRS
    assert log.pairs[-1].peer == f"n{MAX_PAIRS + 4}"
