"""The data plane's ends of one rank, with every transport that its node may use. Called once, as a node starts."""

from __future__ import annotations

import logging

from common.base.errors import ConfigError
from common.cluster.address import one_interface
from common.config.options import NodeConfig
from common.engine.kv_transfer import OnReceiverEvent, OnSenderEvent
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.copy.cuda import CudaDevice
from kvtransfer.copy.device import RelayDevice
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transports.base import Connector, Listener
from kvtransfer.transports.choose import CUDA_IPC, GLOO, NCCL, SHM, ZMQ
from kvtransfer.transports.collective import CollectiveConnector, CollectiveListener
from kvtransfer.transports.cuda_ipc import CudaIpcConnector, CudaIpcListener
from kvtransfer.transports.same_host import host_id
from kvtransfer.transports.shm import ShmConnector, ShmListener
from kvtransfer.transports.zmq import ZmqConnector, ZmqListener

log = logging.getLogger(__name__)


def make_sender(config: NodeConfig, storage: KVStorage, layout: KVLayout, rank: int, on_event: OnSenderEvent) -> Sender:
    """A rank's `KVSender`, with the transports that `config.kv_transport` allows.

    Raises: ConfigError if there is none on this host, or one cannot work with these sizes.
    """
    device = _device(storage)
    connectors = [_connector(name, config, storage, device) for name in _allowed(config.kv_transport, storage)]
    return Sender(storage, layout, rank, on_event, connectors, device=device, wanted=config.kv_transport)


def make_receiver(
    config: NodeConfig,
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnReceiverEvent,
    *,
    port: int,
    incarnation: str,
) -> Receiver:
    """A rank's `KVReceiver`, with the transports that `config.kv_transport` allows. The first of them that needs a
    port takes `port`, 0 being any free one.

    Raises: ConfigError if there is none on this host, or it cannot listen.
    """
    device = _device(storage)
    listeners: list[Listener] = []
    try:
        for name in _allowed(config.kv_transport, storage):
            listeners.append(_listener(name, config, storage, device, port))
            port = 0 if name not in (SHM, CUDA_IPC) else port
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return Receiver(storage, layout, rank, on_event, listeners, device=device, incarnation=incarnation)


def _device(storage: KVStorage) -> RelayDevice | None:
    return None if storage.words is not None else CudaDevice(storage)


def _allowed(wanted: str, storage: KVStorage) -> list[str]:
    """The transports of this end, by name. Raises: ConfigError if there is none."""
    on_device, one_host = storage.words is None, host_id() is not None
    collective = NCCL if on_device else GLOO
    if wanted == "collective":
        return [collective]
    if wanted == "auto":
        # gloo does nothing that ZMQ does not, so nobody listens for it unasked.
        local = [SHM, *([CUDA_IPC] if on_device else [])]
        return [ZMQ, *(local if one_host else []), *([NCCL] if on_device else [])]
    if wanted == SHM and not one_host:
        raise ConfigError("kv_transport is shm, but memory cannot be shared here: it needs Linux")
    if wanted == CUDA_IPC and not (on_device and one_host):
        raise ConfigError("kv_transport is cuda_ipc, which needs Linux, and KV on a CUDA device")
    return [wanted]


def _connector(name: str, config: NodeConfig, storage: KVStorage, device: RelayDevice | None) -> Connector:
    match name:
        case "zmq":
            return ZmqConnector()
        case "shm":
            return ShmConnector()
        case "cuda_ipc" if device is not None:
            return CudaIpcConnector(device, storage)
        case _:
            return CollectiveConnector(one_interface(config), backend=name, card=device.card if device else "")


def _listener(name: str, config: NodeConfig, storage: KVStorage, device: RelayDevice | None, port: int) -> Listener:
    match name:
        case "zmq":
            return ZmqListener(config.host, port)
        case "shm":
            return ShmListener()
        case "cuda_ipc" if device is not None:
            return CudaIpcListener(device, storage)
        case _:
            return CollectiveListener(one_interface(config), port, backend=name, card=device.card if device else "")
