"""Two ends of a transport in two processes: what both sides build, equal by construction."""

from __future__ import annotations

from typing import Any

from support.host_device import HostDevice
from support.transfer_harness import layout

from common.base.clock import Clock, monotonic
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    IncomingTransfer,
    OutgoingTransfer,
)
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.transports.collective import CollectiveReceiver, CollectiveSender
from kvtransfer.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from kvtransfer.transports.shm import ShmReceiver, ShmSender
from kvtransfer.transports.zmq import ZmqReceiver, ZmqSender

KEY = AttemptKey("r", 1)
BLOCKS = 8
HASHES = [bytes([i]) * 16 for i in range(BLOCKS)]
IDS = list(range(BLOCKS))
KV = layout()
BIG = KVLayout("model", 4, 2, 512, "float32", block_size=64)
"""1 MiB for each block of one layer: several messages, which no socket buffer swallows whole."""
TRANSPORTS = ("zmq", "shm", "cuda_ipc", "collective")


def make_sender(transport: str, storage: KVStorage, on_event: Any) -> Any:
    match transport:
        case "zmq":
            return ZmqSender(storage, storage.layout, 0, on_event, min_message_bytes=1)
        case "shm":
            return ShmSender(storage, storage.layout, 0, on_event, min_message_bytes=1)
        case "cuda_ipc":
            return CudaIpcSender(storage, storage.layout, 0, on_event, HostDevice(storage), min_message_bytes=1)
        case _:
            return CollectiveSender(storage, storage.layout, 0, "127.0.0.1", on_event, min_message_bytes=1, timeout_s=1)


def make_receiver(transport: str, storage: KVStorage, on_event: Any, clock: Clock = monotonic) -> Any:
    match transport:
        case "zmq":
            return ZmqReceiver(storage, storage.layout, 0, "127.0.0.1", 0, on_event, clock)
        case "shm":
            return ShmReceiver(storage, storage.layout, 0, on_event, clock=clock)
        case "cuda_ipc":
            return CudaIpcReceiver(storage, storage.layout, 0, on_event, HostDevice(storage), clock=clock)
        case _:
            return CollectiveReceiver(storage, storage.layout, 0, "127.0.0.1", 0, on_event, clock, timeout_s=1)


def storage_of(kv: KVLayout) -> KVStorage:
    return KVStorage(kv, kv.shard(0, 0), 16)


def incoming(kv: KVLayout = KV) -> IncomingTransfer:
    return IncomingTransfer(KEY, PeerRef("p", "src-1", "", []), kv, IDS, HASHES, 0, 60.0)


def outgoing() -> OutgoingTransfer:
    return OutgoingTransfer(KEY, "src-1", IDS, HASHES, 32, 60.0)


def grant_of(address: str, kv: KVLayout = KV) -> Grant:
    return Grant(KEY, PeerRef("d", "dst-1", "", [address]), kv, 0, IDS)
