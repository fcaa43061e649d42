"""The ends of every transport for the tests of `kvtransfer`: as a `Cluster` makes them, with small messages.

Options go to the sender; a small message makes every transfer take several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support.host_device import HostDevice
from support.transfer_harness import Cluster, Recorder, layout

from common.base.clock import Clock
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transports.collective import CollectiveReceiver, CollectiveSender
from kvtransfer.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from kvtransfer.transports.loopback import LoopbackNetwork, LoopbackReceiver, LoopbackSender
from kvtransfer.transports.shm import ShmReceiver, ShmSender
from kvtransfer.transports.zmq import ZmqReceiver, ZmqSender


@dataclass
class Transport:
    """Both ends as functions of (storage, layout, rank, on_event) and of keywords, `clock` among them."""

    make_sender: Callable[..., Any]
    make_receiver: Callable[..., Any]

    def sender(self, storage: KVStorage, kv: KVLayout, rank: int, on_event: Recorder, clock: Clock) -> Any:
        return self.make_sender(storage, kv, rank, on_event, clock=clock)

    def receiver(self, storage: KVStorage, kv: KVLayout, rank: int, on_event: Recorder, clock: Clock) -> Any:
        return self.make_receiver(storage, kv, rank, on_event, clock=clock, incarnation="dst-1")


def zmq(**options: Any) -> Transport:
    given = {"staging_bytes": 1024, "window": 4, "min_message_bytes": 1} | options
    return Transport(
        lambda *where, **kw: ZmqSender(*where, **given, **kw),
        lambda storage, kv, rank, on_event, **kw: ZmqReceiver(storage, kv, rank, "127.0.0.1", 0, on_event, **kw),
    )


def shm(**options: Any) -> Transport:
    """Few small pages, so that every transfer goes round the ring."""
    given = {"page_bytes": 1024, "num_pages": 4, "min_message_bytes": 1} | options
    return Transport(lambda *where, **kw: ShmSender(*where, **given, **kw), ShmReceiver)


def loopback() -> Transport:
    network = LoopbackNetwork()
    return Transport(
        lambda *where, **kw: LoopbackSender(*where, network, min_message_bytes=1, **kw),
        lambda *where, **kw: LoopbackReceiver(*where, network, **kw),
    )


def collective(timeout_s: float = 10.0, **options: Any) -> Transport:
    """Gloo."""
    given = {"staging_bytes": 1024, "window": 4, "min_message_bytes": 1, "timeout_s": timeout_s} | options
    return Transport(
        lambda storage, kv, rank, on_event, **kw: CollectiveSender(
            storage, kv, rank, "127.0.0.1", on_event, **given, **kw
        ),
        lambda storage, kv, rank, on_event, **kw: CollectiveReceiver(
            storage, kv, rank, "127.0.0.1", 0, on_event, timeout_s=timeout_s, **kw
        ),
    )


def cuda_ipc(device: Callable[[KVStorage], Any] = HostDevice, **options: Any) -> Transport:
    """On a stand-in for the card, whose marks come late."""
    given = {"message_bytes": 1024, "window": 4, "min_message_bytes": 1} | options
    return Transport(
        lambda storage, *where, **kw: CudaIpcSender(storage, *where, device(storage), **given, **kw),
        lambda storage, *where, **kw: CudaIpcReceiver(storage, *where, device(storage), **kw),
    )


def staged(connector: Callable[[], Any], listener: Callable[[], Any]) -> Transport:
    """KV on a stand-in for a card, through host memory."""
    return Transport(
        lambda storage, *where, **kw: Sender(
            storage, *where, [connector()], device=HostDevice(storage), min_message_bytes=1, **kw
        ),
        lambda storage, *where, **kw: Receiver(storage, *where, [listener()], device=HostDevice(storage), **kw),
    )


@contextmanager
def clusters(make_transport: Callable[..., Any]) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters of two layouts (one rank each unless given), closed at the end. What `Cluster` does not take goes
    to `make_transport`."""
    made: list[Cluster] = []

    def make(src: KVLayout | None = None, dst: KVLayout | None = None, **options: Any) -> Cluster:
        own = {name: options.pop(name) for name in ("clock", "num_blocks") if name in options}
        made.append(Cluster(make_transport(**options), src or layout(), dst or layout(), **own))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
