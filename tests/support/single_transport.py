"""Senders and receivers with a single transport, for tests and benchmarks. (A node has every transport that it may use.)

Each function takes (storage, layout, rank, on_event), the options of its transport, and those of `Sender` or `Receiver`.
Receivers listen on a free port of loopback unless told otherwise.
"""

from __future__ import annotations

from typing import Any

from common.engine.kv_transfer import OnReceiverEvent, OnSenderEvent
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.copy.device import RelayDevice
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
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


def zmq_sender(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnSenderEvent,
    *,
    message_bytes: int = MESSAGE_BYTES,
    window: int = 8,
    **options: Any,
) -> Sender:
    connector = ZmqConnector(message_bytes=message_bytes, window=window)
    return Sender(storage, layout, rank, on_event, [connector], **options)


def zmq_receiver(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnReceiverEvent,
    *,
    host: str = LOOPBACK_HOST,
    port: int = 0,
    seals: bool = False,
    **options: Any,
) -> Receiver:
    return Receiver(storage, layout, rank, on_event, [ZmqListener(host, port, seals=seals)], **options)


def shm_sender(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnSenderEvent,
    *,
    page_bytes: int = PAGE_BYTES,
    num_pages: int = NUM_PAGES,
    **options: Any,
) -> Sender:
    connector = ShmConnector(page_bytes=page_bytes, num_pages=num_pages)
    return Sender(storage, layout, rank, on_event, [connector], **options)


def shm_receiver(
    storage: KVStorage, layout: KVLayout, rank: int, on_event: OnReceiverEvent, **options: Any
) -> Receiver:
    return Receiver(storage, layout, rank, on_event, [ShmListener()], **options)


def gloo_sender(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnSenderEvent,
    *,
    message_bytes: int = MESSAGE_BYTES,
    window: int = WINDOW,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> Sender:
    connector = CollectiveConnector(LOOPBACK_HOST, message_bytes=message_bytes, window=window, timeout_s=timeout_s)
    return Sender(storage, layout, rank, on_event, [connector], wanted="collective", **options)


def gloo_receiver(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnReceiverEvent,
    *,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> Receiver:
    listener = CollectiveListener(LOOPBACK_HOST, 0, timeout_s=timeout_s)
    return Receiver(storage, layout, rank, on_event, [listener], **options)


def cuda_ipc_sender(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnSenderEvent,
    *,
    device: RelayDevice,
    message_bytes: int = cuda_ipc.MESSAGE_BYTES,
    same_gpu_bytes: int = cuda_ipc.SAME_GPU_BYTES,
    window: int = cuda_ipc.WINDOW,
    **options: Any,
) -> Sender:
    connector = CudaIpcConnector(
        device, storage, message_bytes=message_bytes, same_gpu_bytes=same_gpu_bytes, window=window
    )
    return Sender(storage, layout, rank, on_event, [connector], device=device, **options)


def cuda_ipc_receiver(
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnReceiverEvent,
    *,
    device: RelayDevice,
    **options: Any,
) -> Receiver:
    return Receiver(storage, layout, rank, on_event, [CudaIpcListener(device, storage)], device=device, **options)
