"""Senders and receivers of every transport for the tests of `kvtransfer`, in the form that `Cluster` needs.

Options go to the sender. Messages are small, so that every transfer takes several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support import single_transport
from support.host_device import HostDevice
from support.loopback_transport import LoopbackNetwork, loopback_receiver, loopback_sender
from support.transfer_harness import Cluster, Recorder, layout

from common.base.clock import Clock
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.transfer_end import TransferEnd


@dataclass
class Transport:
    """Functions of (storage, layout, rank, on_event) and keywords, `clock` among them, that make a sender or a receiver."""

    make_sender: Callable[..., Any]
    make_receiver: Callable[..., Any]

    def sender(self, storage: KVStorage, kv: KVLayout, rank: int, on_event: Recorder, clock: Clock) -> Any:
        return self.make_sender(storage, kv, rank, on_event, clock=clock)

    def receiver(self, storage: KVStorage, kv: KVLayout, rank: int, on_event: Recorder, clock: Clock) -> Any:
        return self.make_receiver(storage, kv, rank, on_event, clock=clock)


def zmq(seals: bool = False, **options: Any) -> Transport:
    given = {"message_bytes": 1024, "window": 4, "min_message_bytes": 1} | options
    return Transport(
        lambda *where, **kw: single_transport.zmq_sender(*where, **given, **kw),
        lambda *where, **kw: single_transport.zmq_receiver(*where, seals=seals, **kw),
    )


def shm(**options: Any) -> Transport:
    """Shared memory with few small pages, so that every transfer reuses them."""
    given = {"page_bytes": 1024, "num_pages": 4, "min_message_bytes": 1} | options
    return Transport(
        lambda *where, **kw: single_transport.shm_sender(*where, **given, **kw), single_transport.shm_receiver
    )


def loopback() -> Transport:
    network = LoopbackNetwork()
    return Transport(
        lambda *where, **kw: loopback_sender(*where, network, min_message_bytes=1, **kw),
        lambda *where, **kw: loopback_receiver(*where, network, **kw),
    )


def collective(timeout_s: float = 10.0, **options: Any) -> Transport:
    """Ranks that relay over gloo."""
    given = {"message_bytes": 1024, "window": 4, "min_message_bytes": 1, "timeout_s": timeout_s} | options
    return Transport(
        lambda *where, **kw: single_transport.gloo_sender(*where, **given, **kw),
        lambda *where, **kw: single_transport.gloo_receiver(*where, timeout_s=timeout_s, **kw),
    )


def cuda_ipc(device: Callable[[KVStorage], Any] = HostDevice, **options: Any) -> Transport:
    """CUDA IPC on a simulated GPU, whose marks complete late."""
    given = {"message_bytes": 1024, "window": 4, "min_message_bytes": 1, "same_gpu_bytes": 0} | options
    return Transport(
        lambda storage, *where, **kw: single_transport.cuda_ipc_sender(
            storage, *where, device=device(storage), **given, **kw
        ),
        lambda storage, *where, **kw: single_transport.cuda_ipc_receiver(storage, *where, device=device(storage), **kw),
    )


def staged(connector: Callable[[], Any], listener: Callable[[], Any]) -> Transport:
    """KV on a simulated GPU, sent through host memory."""
    return Transport(
        lambda storage, *where, **kw: TransferEnd(
            storage,
            *where,
            [connector()],
            incarnation="src-1",
            device=HostDevice(storage),
            min_message_bytes=1,
            **kw,
        ),
        lambda storage, *where, **kw: TransferEnd(
            storage, *where, [], [listener()], incarnation="dst-1", device=HostDevice(storage), **kw
        ),
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
