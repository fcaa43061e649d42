"""One transfer end sends and receives at the same time, over every transport that runs without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from support.host_device import HostDevice
from support.kv_words import kv_words
from support.transfer_harness import Recorder, layout, wait_until
from support.transport_conformance import relay_threads

from common.config.service_configs import PrefillConfig
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    GrantOrder,
    OpenDestinationOrder,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    TransferPlan,
)
from common.kv.storage import KVStorage
from kvtransfer.factory import make_end
from kvtransfer.transfer_end import TransferEnd
from kvtransfer.transports.collective.connector import CollectiveConnector
from kvtransfer.transports.collective.listener import CollectiveListener
from kvtransfer.transports.cuda_ipc import CudaIpcConnector, CudaIpcListener
from kvtransfer.transports.shm.connector import ShmConnector
from kvtransfer.transports.shm.listener import ShmListener
from kvtransfer.transports.zmq import ZmqConnector, ZmqListener

KV = layout()
BLOCKS, TOTAL = 64, 24
HASHES = [bytes([i]) * 16 for i in range(TOTAL)]
HOST = "127.0.0.1"

TRANSPORTS: dict[str, Callable[[Any, KVStorage], tuple[Any, Any]]] = {
    "zmq": lambda *_: (ZmqConnector(message_bytes=1024, window=4), ZmqListener(HOST, 0)),
    "sealed-zmq": lambda *_: (ZmqConnector(message_bytes=1024, window=4), ZmqListener(HOST, 0, seals=True)),
    "shm": lambda *_: (ShmConnector(page_bytes=1024, num_pages=4), ShmListener()),
    "collective": lambda *_: (
        CollectiveConnector(HOST, message_bytes=1024, window=4),
        CollectiveListener(HOST, 0),
    ),
    "cuda_ipc": lambda device, storage: (
        CudaIpcConnector(device, storage, message_bytes=1024, same_gpu_bytes=0, window=4),
        CudaIpcListener(device, storage),
    ),
}
"""Functions of (device, storage) that make a connector and a listener."""


class Node:
    """A node of one rank that lends and takes KV. Its lower blocks hold random KV, the upper ones nothing."""

    def __init__(self, name: str, transport: str, seed: int) -> None:
        self.name = name
        self.storage = KVStorage(KV, KV.shard(0, 0), BLOCKS)
        words = kv_words(self.storage)
        words[:, :, :TOTAL] = np.random.default_rng(seed).integers(1, 2**16, words[:, :, :TOTAL].shape)
        self.recorder = Recorder()
        device = HostDevice(self.storage) if transport == "cuda_ipc" else None
        connector, listener = TRANSPORTS[transport](device, self.storage)
        self.end = TransferEnd(
            self.storage,
            KV,
            0,
            self.recorder,
            [connector],
            [listener],
            incarnation=name,
            device=device,
            wanted="collective" if transport == "collective" else "auto",
            min_message_bytes=1,
        )

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.name, self.name, "", [self.end.address])


class Move:
    """One attempt, from the lower blocks of `src` to upper blocks of `dst`."""

    def __init__(self, name: str, src: Node, dst: Node) -> None:
        self.key, self.src, self.dst = AttemptKey(name, 1), src, dst
        self.src_blocks, self.dst_blocks = list(range(TOTAL)), list(range(BLOCKS - TOTAL, BLOCKS))
        dst.end.apply(OpenDestinationOrder(self._plan(self.dst_blocks), src.peer, KV))
        src.end.apply(OpenSourceOrder(self._plan(self.src_blocks)))
        src.end.apply(GrantOrder(Grant(self.key, dst.peer, KV, [0], [pack_ids(self.dst_blocks)])))

    def _plan(self, blocks: list[int]) -> TransferPlan:
        return TransferPlan(self.key, [blocks], [0], HASHES, 60.0)

    def final(self, num_blocks: int) -> None:
        for layer in range(4):
            self.src.end.blocks_final(self.key, layer, num_blocks)

    def arrived(self, num_blocks: int) -> bool:
        sent = kv_words(self.src.storage)[:, :, :num_blocks]
        return np.array_equal(kv_words(self.dst.storage)[:, :, self.dst_blocks[:num_blocks]], sent)

    def check(self) -> None:
        received = self.dst.recorder.wait(self.key, (Received, ReceiveFailed))
        assert isinstance(received, Received), received
        released = self.src.recorder.wait(self.key, SourceReleased)
        assert (released.error, released.bytes_sent) == (None, received.bytes_received)
        self.dst.recorder.wait(self.key, DestinationReleased)
        assert self.arrived(TOTAL)
        for node, count in ((self.src, 1), (self.dst, 1)):
            assert len(node.recorder.of(self.key, (SourceReleased, DestinationReleased))) == count


@pytest.fixture(params=TRANSPORTS)
def nodes(request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    made = [Node(name, request.param, seed) for seed, name in enumerate("abc")]
    yield made
    for node in made:
        node.end.close()
    assert not relay_threads()


def test_two_ends_exchange_kv_both_ways_at_once(nodes: list[Node]) -> None:
    a, b, _ = nodes
    moves = [Move("there", a, b), Move("back", b, a)]
    for upto in (7, TOTAL):
        for move in moves:
            move.final(upto)
        for move in moves:
            wait_until(lambda move=move, upto=upto: move.arrived(upto), f"{upto} blocks of {move.key}")
    for move in moves:
        move.check()


def test_end_sends_one_attempt_while_it_receives_another(nodes: list[Node]) -> None:
    a, b, c = nodes
    comes, goes = Move("comes", a, b), Move("goes", b, c)
    for move in (comes, goes):
        move.final(5)
    for move in (comes, goes):
        wait_until(lambda move=move: move.arrived(5), f"the first blocks of {move.key}")
    assert not b.recorder.events, "both are in progress"
    assert sum(t.name.startswith("kv-transfers") for t in threading.enumerate()) == len(nodes), "one I/O thread each"
    for move in (goes, comes):
        move.final(TOTAL)
    comes.check()
    goes.check()


def test_abort_of_one_direction_leaves_the_other_alone(nodes: list[Node]) -> None:
    a, b, c = nodes
    comes, goes = Move("comes", a, b), Move("goes", b, c)
    for move in (comes, goes):
        move.final(5)
    wait_until(lambda: comes.arrived(5), "the first blocks")
    b.end.apply(AbortOrder(goes.key))
    assert b.recorder.wait(goes.key, SourceReleased).error is not None
    comes.final(TOTAL)
    comes.check()
    c.end.apply(AbortOrder(goes.key))
    c.recorder.wait(goes.key, DestinationReleased)


def test_failure_of_the_thread_ends_the_transfers_of_both_directions(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = nodes
    comes, goes = Move("comes", a, b), Move("goes", b, c)
    goes.final(5)
    wait_until(lambda: goes.arrived(5), "the first blocks")

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(b.end._send.table, "expire", fail)
    b.end.apply(AbortOrder(AttemptKey("nobody", 1)))
    assert b.recorder.wait(goes.key, SourceReleased).error is not None
    b.recorder.wait(comes.key, ReceiveFailed)
    for node in (b, c):
        node.end.apply(AbortOrder(comes.key if node is b else goes.key))
    b.recorder.wait(comes.key, DestinationReleased)
    c.recorder.wait(goes.key, DestinationReleased)
    again = Move("again", a, b)
    again.final(TOTAL)
    again.check()


def test_rank_that_only_sends_listens_nowhere() -> None:
    def listening() -> int:
        sockets = psutil.Process().net_connections(kind="inet")
        return sum(each.status == psutil.CONN_LISTEN for each in sockets)

    before = listening()
    end = make_end(PrefillConfig(), KVStorage(KV, KV.shard(0, 0), 4), KV, 0, Recorder(), incarnation="p")
    try:
        assert end.address == ""
        assert listening() == before
    finally:
        end.close()
