"""Transfer ends with a single transport and direction, for tests and benchmarks. (A node has every transport that it may use.)

Each function takes (storage, layout, rank, on_event), the options of its transport, and those of `TransferEnd`. Receivers
listen on a free port of loopback unless told otherwise. The incarnations are "src-1" and "dst-1" by default.
"""

from __future__ import annotations

from typing import Any

from common.engine.kv_transfer import OnTransferEvent
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.copy.cuda import CudaDevice
from kvtransfer.transfer_end import TransferEnd
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.base import MESSAGE_BYTES
from kvtransfer.transports.collective.connector import CollectiveConnector
from kvtransfer.transports.collective.listener import CollectiveListener
from kvtransfer.transports.collective.protocol import TIMEOUT_S, WINDOW
from kvtransfer.transports.cuda_ipc import CudaIpcConnector, CudaIpcListener
from kvtransfer.transports.shm.connector import NUM_PAGES, PAGE_BYTES, ShmConnector
from kvtransfer.transports.shm.listener import ShmListener
from kvtransfer.transports.zmq import ZmqConnector, ZmqListener

LOOPBACK_HOST = "127.0.0.1"


def _sender(*where: Any, **options: Any) -> TransferEnd:
    return TransferEnd(*where, **{"incarnation": "src-1", **options})


def _receiver(
    storage: KVStorage, layout: KVLayout, rank: int, on_event: OnTransferEvent, listeners: list[Any], **options: Any
) -> TransferEnd:
    return TransferEnd(storage, layout, rank, on_event, [], listeners, **{"incarnation": "dst-1", **options})


def zmq_sender(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    message_bytes: int = MESSAGE_BYTES,
    window: int = 8,
    **options: Any,
) -> TransferEnd:
    connector = ZmqConnector(message_bytes=message_bytes, window=window)
    return _sender(storage, layout, rank, on_event, [connector], **options)


def zmq_receiver(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    host: str = LOOPBACK_HOST,
    port: int = 0,
    seals: bool = False,
    **options: Any,
) -> TransferEnd:
    return _receiver(storage, layout, rank, on_event, [ZmqListener(host, port, seals=seals)], **options)


def shm_sender(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    page_bytes: int = PAGE_BYTES,
    num_pages: int = NUM_PAGES,
    **options: Any,
) -> TransferEnd:
    connector = ShmConnector(page_bytes=page_bytes, num_pages=num_pages)
    return _sender(storage, layout, rank, on_event, [connector], **options)


def shm_receiver(
    storage: KVStorage, layout: KVLayout, rank: int, on_event: OnTransferEvent, **options: Any
) -> TransferEnd:
    return _receiver(storage, layout, rank, on_event, [ShmListener()], **options)


def gloo_sender(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    message_bytes: int = MESSAGE_BYTES,
    window: int = WINDOW,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> TransferEnd:
    connector = CollectiveConnector(LOOPBACK_HOST, message_bytes=message_bytes, window=window, timeout_s=timeout_s)
    return _sender(storage, layout, rank, on_event, [connector], wanted="collective", **options)


def gloo_receiver(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> TransferEnd:
    listener = CollectiveListener(LOOPBACK_HOST, 0, timeout_s=timeout_s)
    return _receiver(storage, layout, rank, on_event, [listener], **options)


def cuda_ipc_sender(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    device: CudaDevice,
    message_bytes: int = cuda_ipc.MESSAGE_BYTES,
    same_gpu_bytes: int = cuda_ipc.SAME_GPU_BYTES,
    window: int = cuda_ipc.WINDOW,
    **options: Any,
) -> TransferEnd:
    connector = CudaIpcConnector(
        device, storage, message_bytes=message_bytes, same_gpu_bytes=same_gpu_bytes, window=window
    )
    return _sender(storage, layout, rank, on_event, [connector], device=device, **options)


def cuda_ipc_receiver(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    device: CudaDevice,
    **options: Any,
) -> TransferEnd:
    return _receiver(storage, layout, rank, on_event, [CudaIpcListener(device, storage)], device=device, **options)
