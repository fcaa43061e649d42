"""Transfers, layouts and transports that a sender and a receiver in two processes build identically."""

from __future__ import annotations

from typing import Any

from support import single_transport
from support.host_device import HostDevice
from support.transfer_harness import layout

from common.base.clock import Clock, monotonic
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import GrantOrder, OpenDestinationOrder, OpenSourceOrder, TransferPlan
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

KEY = AttemptKey("r", 1)
BLOCKS = 8
HASHES = [bytes([i]) * 16 for i in range(BLOCKS)]
IDS = list(range(BLOCKS))
KV = layout()
BIG = KVLayout("model", KVSpec.uniform(4, 2, 512, "float32", block_size=64))
"""1 MiB for each block of one layer: several messages, which do not fit into any socket buffer."""
TRANSPORTS = ("zmq", "shm", "cuda_ipc", "collective")


def make_sender(transport: str, storage: KVStorage, on_event: Any) -> Any:
    where = storage, storage.layout, 0, on_event
    match transport:
        case "zmq":
            return single_transport.zmq_sender(*where, min_message_bytes=1)
        case "shm":
            return single_transport.shm_sender(*where, min_message_bytes=1)
        case "cuda_ipc":
            return single_transport.cuda_ipc_sender(
                *where, device=HostDevice(storage), min_message_bytes=1, same_gpu_bytes=0
            )
        case _:
            return single_transport.gloo_sender(*where, min_message_bytes=1, timeout_s=1)


def make_receiver(transport: str, storage: KVStorage, on_event: Any, clock: Clock = monotonic) -> Any:
    where = storage, storage.layout, 0, on_event
    match transport:
        case "zmq":
            return single_transport.zmq_receiver(*where, clock=clock)
        case "shm":
            return single_transport.shm_receiver(*where, clock=clock)
        case "cuda_ipc":
            return single_transport.cuda_ipc_receiver(*where, device=HostDevice(storage), clock=clock)
        case _:
            return single_transport.gloo_receiver(*where, clock=clock, timeout_s=1)


def storage_of(kv: KVLayout) -> KVStorage:
    return KVStorage(kv, kv.shard(0, 0), 16)


def plan_of(key: AttemptKey = KEY) -> TransferPlan:
    return TransferPlan(key, [IDS], [0], HASHES, 60.0)


def incoming(kv: KVLayout = KV, key: AttemptKey = KEY) -> OpenDestinationOrder:
    return OpenDestinationOrder(plan_of(key), PeerRef("p", "src-1", "", []), kv)


def outgoing(key: AttemptKey = KEY, final_blocks: int = 0) -> OpenSourceOrder:
    return OpenSourceOrder(plan_of(key), final_blocks)


def grant_of(address: str, kv: KVLayout = KV, key: AttemptKey = KEY, incarnation: str = "dst-1") -> GrantOrder:
    return GrantOrder(Grant(key, PeerRef("d", incarnation, "", [address]), kv, [0], [pack_ids(IDS)]))
