"""Guarantees of lending blocks: the sender can always take blocks back, and a receiver discards what it read too late.

On a simulated GPU (`host_device`); on a real one: tests/gpu/test_relay_on_gpu.py.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import transports
from support.host_device import HostDevice
from support.kv_words import kv_words
from support.mock_clock import MockClock
from support.transfer_harness import DEADLINE_S, Cluster, layout, wait_until

from common.base.errors import DeadlineExceeded, PeerLost, TransferAborted
from common.base.hashing import HASH_BYTES
from common.control.messages import AttemptKey, PeerRef
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    TransferPlan,
)
from common.kv.storage import KVStorage
from kvtransfer import wire
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.choose import TransportOffer
from kvtransfer.transports.same_host import host_id
from kvtransfer.transports.shm import ring


class Gate:
    """A mark that a test opens."""

    def __init__(self) -> None:
        self.open = False

    def done(self) -> bool:
        return self.open


class GatedDevice(HostDevice):
    """A GPU whose compute stream and copies do not advance while their gates are closed."""

    def __init__(self, storage: KVStorage) -> None:
        super().__init__(storage)
        self.compute, self.copying = Gate(), Gate()
        self.compute.open = self.copying.open = True

    def mark(self) -> Any:
        mark = super().mark()
        mark.others = (self.compute,)
        return mark

    def fence(self) -> Any:
        mark = super().fence()
        mark.others += (self.copying,)
        return mark


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[GatedDevice] = []

    def device(storage: KVStorage) -> GatedDevice:
        made.append(GatedDevice(storage))
        return made[-1]

    with transports.clusters(partial(transports.cuda_ipc, device, window=3)) as make:
        yield make
        for each in made:
            each.compute.open = each.copying.open = True


def devices(cluster: Cluster) -> tuple[GatedDevice, GatedDevice]:
    """The receiver's and the sender's."""
    return cluster.receivers[0].end._device, cluster.senders[0].end._device


def test_nothing_is_lent_before_the_gpu_has_computed_it(make: Any) -> None:
    """The engine reports a layer as soon as its kernels are launched."""
    cluster = make()
    _, theirs = devices(cluster)
    transfer = cluster.transfer(tokens=27)
    theirs.compute.open = False
    transfer.hand_over()
    cluster.transfer("fence", seed=3).open_receivers()
    wait_until(lambda: len(cluster.senders[0].end._final._commands) >= 4, "the sender has taken the reports")
    assert not cluster.senders[0].end._traffic._open
    transfer.compute()
    theirs.compute.open = True
    transfer.check_received()


def test_cached_blocks_are_lent_once_the_gpu_has_computed_them(make: Any) -> None:
    cluster = make()
    _, theirs = devices(cluster)
    transfer = cluster.transfer(tokens=12)
    theirs.compute.open = False
    sender = cluster.senders[0].end
    plan = TransferPlan(transfer.key, [transfer.src_blocks], [0], transfer.hashes, 60.0)
    sender.apply(OpenSourceOrder(plan, final_blocks=3))
    transfer.open_receivers()
    transfer.grant()
    wait_until(lambda: len(sender._final._commands) == 4, "the sender waits for the GPU")
    assert not sender._traffic._open
    transfer.compute()
    theirs.compute.open = True
    transfer.check_received()


@pytest.mark.parametrize("gpu", ["the same", "another"])
def test_a_receiver_on_the_same_gpu_is_lent_several_layers_at_a_time(
    make: Any, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    """Each of its copies would interrupt the sender's computation; one on another GPU interrupts nothing."""
    kv = layout()
    per_layer = 3 * kv.spec.bytes_per_block // kv.spec.num_layers
    cluster = make(same_gpu_bytes=2 * per_layer, message_bytes=2**20)
    _, theirs = devices(cluster)
    if gpu == "another":
        monkeypatch.setattr(type(theirs), "gpu_id", property(lambda self: f"GPU-{id(self)}"))
    transfer = cluster.transfer(tokens=12)
    transfer.compute()
    transfer.open_receivers()
    transfer.open_senders()
    transfer.grant()
    sent: list[int] = []
    for layer in range(kv.spec.num_layers):
        transfer.final(layers=range(layer, layer + 1))
        time.sleep(0.1)
        [peer] = cluster.senders[0].end._send._peers.values()
        sent.append(peer._sequence)
    assert sent == ([0, 1, 1, 2] if gpu == "the same" else [1, 2, 3, 4])
    transfer.check_received()


def test_destination_is_written_only_after_earlier_gpu_work_on_it(make: Any) -> None:
    """A step in progress may still write a row of a sequence that has ended."""
    cluster = make()
    ours, _ = devices(cluster)
    transfer = cluster.transfer(tokens=27)
    transfer.compute()
    transfer.poison_destination()
    ours.compute.open = False
    transfer.hand_over()
    wait_until(lambda: ours.copies > 0, "the copies are started")
    transfer.check_destination_untouched()
    ours.compute.open = True
    transfer.check_received()


def stuck(cluster: Cluster, request: str = "r", **options: Any) -> Any:
    """A transfer whose copies the receiver's GPU has started and does not complete."""
    ours, _ = devices(cluster)
    transfer = cluster.transfer(request, tokens=100, **options)
    transfer.compute()
    transfer.open_receivers()
    ours.copying.open = False
    transfer.open_senders()
    transfer.grant()
    started = ours.copies
    transfer.final()
    wait_until(lambda: ours.copies >= started + 3, "a window of copies is in progress")
    return transfer


def test_destination_is_not_released_before_the_copies_have_ended(make: Any) -> None:
    cluster = make()
    transfer = stuck(cluster)
    assert not cluster.senders[0].recorder.events
    cluster.receivers[0].end.apply(AbortOrder(transfer.key))
    probe = cluster.transfer("probe", tokens=1, held=1)
    probe.open_receivers()
    cluster.receivers[0].recorder.wait(probe.key, DestinationReleased)
    assert not cluster.receivers[0].recorder.of(transfer.key, DestinationReleased)
    devices(cluster)[0].copying.open = True
    cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, TransferAborted)


def test_aborting_sender_releases_its_blocks_at_once_and_late_copies_are_never_received(make: Any) -> None:
    cluster = make()
    transfer = stuck(cluster)
    cluster.senders[0].end.apply(AbortOrder(transfer.key))
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, TransferAborted)
    kv_words(cluster.senders[0].storage)[:] = 0xA5  # the engine computes something else there
    devices(cluster)[0].copying.open = True
    failed = cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)
    assert "took the blocks back" in str(failed.error)
    assert not cluster.receivers[0].recorder.of(transfer.key, Received)
    cluster.receivers[0].end.apply(AbortOrder(transfer.key))
    cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)
    cluster.transfer("next", tokens=60).run()


def test_receiver_that_hangs_delays_its_transfer_no_longer_than_the_deadline(make: Any) -> None:
    clock = MockClock()
    cluster = make(clock=clock)
    transfer = stuck(cluster, timeout_s=5.0)

    def deadline_has_passed() -> bool:
        # Again and again: a report of final blocks that is taken only now counts as progress.
        clock.advance(6.0)
        cluster.senders[0].end.apply(AbortOrder(AttemptKey("nobody", 1)))
        return bool(cluster.senders[0].recorder.events)

    wait_until(deadline_has_passed, "the deadline")
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, DeadlineExceeded)
    assert (released.bytes_sent, released.traffic) == (0, ())


def test_receiver_on_a_gpu_that_hangs_can_be_closed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy follows what was computed before, and that may wait for a rank that is gone."""
    monkeypatch.setattr("kvtransfer.transfer_end.CLOSING_S", 0.2)
    cluster = make()
    ours, _ = devices(cluster)
    transfer = cluster.transfer(tokens=27)
    transfer.compute()
    ours.compute.open = False
    transfer.hand_over()
    wait_until(lambda: ours.copies > 0, "the copies are started")
    cluster.receivers[0].end.close()
    assert cluster.receivers[0].recorder.of(transfer.key, DestinationReleased)


def test_copies_in_progress_when_the_receiver_fails_are_acknowledged_when_they_have_ended(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make()
    ours, _ = devices(cluster)
    transfer = cluster.transfer(tokens=27)
    transfer.compute()
    ours.copying.open = False
    transfer.hand_over()
    receiver = cluster.receivers[0].end
    wait_until(lambda: ours.copies > 0, "a copy is in progress")

    def fail(_: float) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(receiver._receive.table, "expire", fail)
    cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)
    assert receiver._receive._unanswered, "the GPU still reads the lent blocks"
    assert not cluster.senders[0].recorder.events
    ours.copying.open = True
    assert cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error is not None
    peer = next(iter(cluster.senders[0].end._send._peers.values()))
    wait_until(lambda: not (peer.in_flight or peer.lent), "the whole window is free again")
    receiver.apply(AbortOrder(transfer.key))
    cluster.transfer("after", tokens=60, seed=1).run()


def test_receiver_that_fails_on_a_gpu_that_hangs_can_be_closed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transfer_end.CLOSING_S", 0.2)
    cluster = make()
    ours, _ = devices(cluster)
    transfer = cluster.transfer(tokens=27)
    transfer.compute()
    ours.copying.open = False
    transfer.hand_over()
    receiver = cluster.receivers[0].end
    wait_until(lambda: ours.copies > 0, "a copy is in progress")
    monkeypatch.setattr(receiver._receive.table, "expire", lambda _: 1 / 0)
    cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)
    closing = threading.Thread(target=receiver.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert cluster.receivers[0].recorder.of(transfer.key, DestinationReleased)


def test_closing_sender_takes_its_blocks_back(make: Any) -> None:
    cluster = make()
    transfer = stuck(cluster)
    cluster.senders[0].end.close()
    assert isinstance(cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error, TransferAborted)
    devices(cluster)[0].copying.open = True
    cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)


def test_abort_while_every_slice_is_lent_counts_nothing_as_sent(make: Any) -> None:
    """Every slice is being copied when the sender aborts: none of them may count as sent."""
    cluster = make()
    ours, _ = devices(cluster)
    transfer = cluster.transfer(tokens=3)
    transfer.compute()
    transfer.open_receivers()
    ours.copying.open = False
    transfer.open_senders()
    transfer.grant()
    transfer.final()
    wait_until(lambda: ours.copies > 0, "a copy is in progress")
    cluster.senders[0].end.apply(AbortOrder(transfer.key))
    assert cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error is not None
    ours.copying.open = True
    cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)


def test_receiver_that_disconnects_ends_all_loans(make: Any) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"kvrelay-test-{os.urandom(8).hex()}"
        listener.bind("\0" + name)
        listener.listen(1)
        listener.settimeout(DEADLINE_S)
        cluster = make()
        transfer = cluster.transfer(tokens=100)
        transfer.open_senders()
        transfer.grant(PeerRef("d", "dst-1", "", [str(TransportOffer("cuda_ipc", f"unix://{host_id()}/{name}"))]))
        connected, _ = listener.accept()
        with connected:
            connected.settimeout(DEADLINE_S)
            _, fds, _, _ = socket.recv_fds(connected, 1000, 2)
            assert len(fds) == 2
            for fd in fds:
                os.close(fd)
            transfer.final()
            assert connected.recv(100)
            assert not cluster.senders[0].recorder.events
        released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
        assert isinstance(released.error, PeerLost)


def greeting(what: str, device: HostDevice, size: int) -> tuple[bytes, list[int], list[bytes]]:
    """The greeting of a malicious sender, the descriptors with it, and its later messages."""
    shared, fd, of_ring = ring.create(2, cuda_ipc._loan_bytes(1))
    memory = [32, 0, 4, 0, 2, size // (4 * 2 * 32)]
    fds, messages = [fd, device.export()], []
    match what:
        case "one descriptor":
            os.close(fds.pop())
        case "more blocks than its memory has":
            memory[0] = 64
        case "other heads":
            memory[5] += 1
        case "no blocks":
            memory[0] = 0
        case "layers that the model does not have":
            memory[2] = 5
        case "heads that the model does not have":
            memory[4] = 3
        case "layers in the wrong order":
            memory[1], memory[2] = 4, 2
        case "cut short":
            return of_ring, fds, []
        case "a ring that holds no loan":
            os.close(fds[0])
            _, fds[0], of_ring = ring.create(2, 4096)
        case _:
            loan = shared.payload(0, 24).view(np.int64)
            loan[:] = {"endless loan": (1, 0, 2**40), "negative loan": (1, -5, 1), "endless bytes": (1, 0, 1)}[what]
            header = bytes(10)
            if what == "endless bytes":
                piece = wire.KVSlice(0, 0, 1, 0, 1, 0, 1)
                header = wire.encode(
                    wire.SliceHeader(AttemptKey("x", 1), "s", "dst-1", 0, 0, 1, [piece], 0, bytes(HASH_BYTES))
                )
            shared.header(0, len(header))[:] = np.frombuffer(header, dtype=np.uint8)
            messages = [struct.pack("<IIQ", 0, len(header), 2**63 if what == "endless bytes" else 10)]
    return of_ring + struct.pack("<6Q", *memory), fds, messages


@pytest.mark.parametrize(
    "what",
    [
        "one descriptor",
        "more blocks than its memory has",
        "other heads",
        "no blocks",
        "layers that the model does not have",
        "heads that the model does not have",
        "layers in the wrong order",
        "cut short",
        "a ring that holds no loan",
        "endless loan",
        "negative loan",
        "endless bytes",
    ],
)
def test_sender_that_misstates_its_memory_is_disconnected(make: Any, what: str) -> None:
    cluster = make()
    receiver = cluster.receivers[0].end
    device = devices(cluster)[1]
    bystander = cluster.transfer("bystander")
    bystander.open_receivers()
    first, fds, messages = greeting(what, device, kv_words(cluster.senders[0].storage).nbytes)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connected:
        connected.settimeout(DEADLINE_S)
        connected.connect("\0" + receiver.address.partition("#")[0].rpartition("/")[2])
        socket.send_fds(connected, [first], fds)
        for fd in fds:
            os.close(fd)
        for message in messages:
            connected.send(message)
        assert connected.recv(100) == b"", "disconnected"
    assert not bystander.cluster.receivers[0].recorder.events
    cluster.transfer().run()


def test_memory_is_unmapped_when_its_connection_ends(make: Any) -> None:
    cluster = make()
    inode = f" {os.fstat(devices(cluster)[1]._fd).st_ino} "

    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(inode in line and "/memfd:" in line for line in lines)  # files on disks may have equal inodes

    assert mapped() == 1, "its owner's"
    cluster.transfer().run()
    assert mapped() == 2
    cluster.senders[0].end.close()
    wait_until(lambda: mapped() == 1, "the receiver has unmapped it")
