"""Sender and receiver in two processes, one of them killed or stopped, over every transport between processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import warm_start
from support.kv_words import kv_words
from support.mock_clock import MockClock
from support.paths import TESTS
from support.transfer_harness import Recorder, wait_until
from support.transport_processes import (
    BIG,
    BLOCKS,
    KEY,
    KV,
    TRANSPORTS,
    grant_of,
    incoming,
    make_receiver,
    make_sender,
    outgoing,
    storage_of,
)

from common.base.errors import DeadlineExceeded, PeerLost
from common.control.messages import AttemptKey
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    Received,
    ReceiveFailed,
    SourceReleased,
)

RECEIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from support.transport_processes import *
kv = KV if sys.argv[3] == "small" else BIG
end = make_receiver(sys.argv[2], storage_of(kv), lambda event: None)
end.apply(incoming(kv))
print(end.address, flush=True)
sys.stdin.read()
"""
SENDER = """
import sys
sys.path.insert(0, sys.argv[1])
from support.transport_processes import *
kv = storage_of(KV)
kv.host_bytes[:] = 7
print("imported", flush=True)
end = make_sender(sys.argv[2], kv, print)
end.apply(outgoing())
end.apply(grant_of(sys.argv[3]))
for layer in range(4):
    end.blocks_final(KEY, layer, BLOCKS - 1)
sys.stdin.read()
"""


@pytest.fixture
def spawn() -> Iterator[Any]:
    children: list[warm_start.WarmScript] = []

    def start(code: str, *args: str) -> warm_start.WarmScript:
        children.append(warm_start.script(code, str(TESTS), *args))
        return children[-1]

    yield start
    for child in children:
        child.end()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_receiver_releases_the_source_long_before_the_deadline(spawn: Any, transport: str) -> None:
    child = spawn(RECEIVER, transport, "small")
    address = child.stdout.readline().strip()
    recorder = Recorder()
    sender = make_sender(transport, storage_of(KV), recorder)
    try:
        sender.apply(outgoing())
        sender.apply(grant_of(address))
        sender.blocks_final(KEY, 0, 1)
        _wait_until_acknowledged(sender)
        child.kill()
        released = recorder.wait(KEY, SourceReleased)
        assert isinstance(released.error, PeerLost)
    finally:
        sender.close()
    _nothing_in_shared_memory()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_sender_fails_the_reception_at_its_deadline_and_not_before(spawn: Any, transport: str) -> None:
    recorder, storage, clock = Recorder(), storage_of(KV), MockClock()
    receiver = make_receiver(transport, storage, recorder, clock)
    try:
        child = spawn(SENDER, transport, receiver.address)
        receiver.apply(incoming())
        assert child.stdout.readline().strip() == "imported"
        wait_until(
            lambda: bool((kv_words(storage)[:, :, : BLOCKS - 1].view(np.uint8) == 7).all()), "what was sent has arrived"
        )
        child.kill()
        child.wait()
        receiver.apply(AbortOrder(AttemptKey("nobody", 1)))
        assert not recorder.events
        clock.advance(61.0)
        receiver.apply(AbortOrder(AttemptKey("nobody", 1)))
        failed = recorder.wait(KEY, ReceiveFailed)
        assert isinstance(failed.error, DeadlineExceeded)
        assert not recorder.of(KEY, DestinationReleased)
        receiver.apply(AbortOrder(KEY))
        recorder.wait(KEY, DestinationReleased)
    finally:
        receiver.close()
    _nothing_in_shared_memory()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped_receiver_delays_no_other_transfer_and_no_close(spawn: Any, transport: str) -> None:
    """SIGSTOP in the middle of a transfer: the connection stays open, but nobody reads."""
    child = spawn(RECEIVER, transport, "big")
    address = child.stdout.readline().strip()
    recorder, other_recorder = Recorder(), Recorder()
    sender = make_sender(transport, storage_of(BIG), recorder)
    other = make_receiver(transport, storage_of(BIG), other_recorder)
    try:
        sender.apply(outgoing())
        sender.apply(grant_of(address, BIG))
        sender.blocks_final(KEY, 0, 1)
        _wait_until_acknowledged(sender)
        os.kill(child.pid, signal.SIGSTOP)
        for layer in range(4):
            sender.blocks_final(KEY, layer, BLOCKS)
        second = AttemptKey("r", 2)
        other.apply(incoming(BIG, second))
        sender.apply(outgoing(second, final_blocks=BLOCKS))
        sender.apply(grant_of(other.address, BIG, second))
        assert isinstance(other_recorder.wait(second, (Received, ReceiveFailed)), Received)
    finally:
        sender.close()
        other.close()
        os.kill(child.pid, signal.SIGCONT)
    assert isinstance(recorder.of(KEY, SourceReleased)[0], SourceReleased)


def test_group_whose_peer_hangs_is_given_up_after_its_own_timeout(spawn: Any) -> None:
    """Gloo waits up to its own timeout; the deadline of the transfer is much later."""
    child = spawn(RECEIVER, "collective", "big")
    address = child.stdout.readline().strip()
    recorder = Recorder()
    sender = make_sender("collective", storage_of(BIG), recorder)
    try:
        sender.apply(outgoing())
        sender.apply(grant_of(address, BIG))
        sender.blocks_final(KEY, 0, 1)
        _wait_until_acknowledged(sender)
        os.kill(child.pid, signal.SIGSTOP)
        for layer in range(4):
            sender.blocks_final(KEY, layer, BLOCKS - 1)
        assert isinstance(recorder.wait(KEY, SourceReleased).error, PeerLost)
    finally:
        sender.close()
        os.kill(child.pid, signal.SIGCONT)


def _wait_until_acknowledged(sender: Any) -> None:
    wait_until(
        lambda: bool(sender._traffic._open) and not any(peer.in_flight for peer in list(sender._send._peers.values())),
        "the first ack",
    )


def _nothing_in_shared_memory() -> None:
    """What other tests have there for a moment goes away by itself."""
    wait_until(lambda: not any("kvrelay" in path.name for path in Path("/dev/shm").iterdir()), "empty shared memory")
