"""One end in another process, killed without warning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from transfer_harness import Recorder, layout, wait_until

from common.clock import MockClock
from common.errors import DeadlineExceeded, PeerLost
from common.kv.storage import KVStorage
from common.protocol import AttemptKey, Grant, PeerRef
from kvtransfer.base import DestinationReleased, IncomingTransfer, OutgoingTransfer, ReceiveFailed, SourceReleased
from kvtransfer.zmq import ZmqReceiver, ZmqSender

KEY = AttemptKey("r", 1)
BLOCKS = 8
HASHES = [bytes([i]) * 16 for i in range(BLOCKS)]
KV = layout()

RECEIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_transfer_zmq_processes import *
kv = KVStorage(KV, KV.shard(0, 0), 16)
end = ZmqReceiver(kv, KV, 0, "127.0.0.1", 0, print)
end.open(IncomingTransfer(KEY, PeerRef("p", "src-1", "", []), KV, list(range(BLOCKS)), HASHES, 0, 60.0))
print(end.address, flush=True)
sys.stdin.read()
"""
SENDER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_transfer_zmq_processes import *
kv = KVStorage(KV, KV.shard(0, 0), 16)
kv.words[:] = 7
print("imported", flush=True)
end = ZmqSender(kv, KV, 0, print, min_message_bytes=1)
end.open(OutgoingTransfer(KEY, "src-1", list(range(BLOCKS)), HASHES, 32, 60.0))
end.grant(Grant(KEY, PeerRef("d", "dst-1", "", [sys.argv[2]]), KV, 0, list(range(BLOCKS))))
for layer in range(4):
    end.blocks_final(KEY, layer, BLOCKS - 1)
sys.stdin.read()
"""


@pytest.fixture
def spawn() -> Iterator[Any]:
    children: list[subprocess.Popen[str]] = []

    def start(code: str, *args: str) -> subprocess.Popen[str]:
        here = __file__.rsplit("/", 1)[0]
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", code, here, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_killed_receiver_releases_the_source_long_before_the_deadline(spawn: Any) -> None:
    child = spawn(RECEIVER)
    address = child.stdout.readline().strip()
    recorder = Recorder()
    storage = KVStorage(KV, KV.shard(0, 0), 16)
    sender = ZmqSender(storage, KV, 0, recorder, min_message_bytes=1)
    try:
        sender.open(OutgoingTransfer(KEY, "src-1", list(range(BLOCKS)), HASHES, 32, 60.0))
        sender.grant(Grant(KEY, PeerRef("d", "dst-1", "", [address]), KV, 0, list(range(BLOCKS))))
        sender.blocks_final(KEY, 0, 1)
        _wait_until_connected(sender)
        child.kill()
        released = recorder.wait(KEY, SourceReleased)
        assert isinstance(released.error, PeerLost)
    finally:
        sender.close()


def test_killed_sender_fails_the_reception_at_its_deadline_and_not_before(spawn: Any) -> None:
    recorder = Recorder()
    storage = KVStorage(KV, KV.shard(0, 0), 16)
    clock = MockClock()
    receiver = ZmqReceiver(storage, KV, 0, "127.0.0.1", 0, recorder, clock)
    try:
        child = spawn(SENDER, receiver.address)
        receiver.open(IncomingTransfer(KEY, PeerRef("p", "src-1", "", []), KV, list(range(BLOCKS)), HASHES, 0, 60.0))
        assert child.stdout.readline().strip() == "imported"
        _wait_for_words(storage)
        child.kill()
        child.wait()
        receiver.abort(AttemptKey("nobody", 1))
        assert not recorder.events
        clock.advance(61.0)
        receiver.abort(AttemptKey("nobody", 1))
        failed = recorder.wait(KEY, ReceiveFailed)
        assert isinstance(failed.error, DeadlineExceeded)
        assert not recorder.of(KEY, DestinationReleased)
        receiver.abort(KEY)
        recorder.wait(KEY, DestinationReleased)
    finally:
        receiver.close()


def _wait_until_connected(sender: ZmqSender) -> None:
    wait_until(lambda: bool(sender._peers) and not next(iter(sender._peers.values())).in_flight, "the first ack")


def _wait_for_words(storage: KVStorage) -> None:
    assert storage.words is not None
    wait_until(lambda: bool((storage.words[:, :, : BLOCKS - 1] == 7).all()), "what was sent has arrived")
