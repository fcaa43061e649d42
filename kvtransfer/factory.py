"""Makes the transfer end of one rank with all transports that its node may use. Called once, when a node starts."""

from __future__ import annotations

import logging

from common.base.errors import ConfigError
from common.engine.kv_transfer import OnTransferEvent, RelaySettings
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.copy.cuda import CudaDevice
from kvtransfer.copy.device import RelayDevice
from kvtransfer.transfer_end import TransferEnd
from kvtransfer.transports.base import Connector, Listener
from kvtransfer.transports.choose import CUDA_IPC, GLOO, NCCL, SHM, ZMQ
from kvtransfer.transports.collective.connector import CollectiveConnector
from kvtransfer.transports.collective.listener import CollectiveListener
from kvtransfer.transports.cuda_ipc import CudaIpcConnector, CudaIpcListener
from kvtransfer.transports.same_host import host_id
from kvtransfer.transports.shm.connector import ShmConnector
from kvtransfer.transports.shm.listener import ShmListener
from kvtransfer.transports.zmq import ZmqConnector, ZmqListener

log = logging.getLogger(__name__)


def make_end(
    relay: RelaySettings,
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    incarnation: str,
    listen_port: int | None = None,
) -> TransferEnd:
    """A rank's transfer end, with the transports that `relay.transport` allows.

    listen_port: where the first transport that needs a port listens for KV; 0 means any free one. None: this rank only
    sends, and opens no listening socket.

    Raises: ConfigError if this host has none of them, one cannot listen, or one does not support these sizes.
    """
    device = _device(storage)
    names = _allowed(relay.transport, storage, collectives=relay.may_use_collectives)
    connectors = [_connector(name, relay, storage, device) for name in names]
    listeners: list[Listener] = []
    try:
        for name in names if listen_port is not None else ():
            listeners.append(_listener(name, relay, storage, device, listen_port or 0))
            listen_port = listen_port if name in (SHM, CUDA_IPC) else 0
    except BaseException:
        for transport in (*connectors, *listeners):
            transport.close()
        raise
    return TransferEnd(
        storage,
        layout,
        rank,
        on_event,
        connectors,
        listeners,
        incarnation=incarnation,
        device=device,
        wanted=relay.transport,
    )


def _device(storage: KVStorage) -> RelayDevice | None:
    return None if storage.host_bytes is not None else CudaDevice(storage)


def _allowed(wanted: str, storage: KVStorage, *, collectives: bool = True) -> list[str]:
    """The names of the transports that this rank may use. Raises: ConfigError if there are none."""
    on_device, one_host = storage.host_bytes is None, host_id() is not None
    collective = NCCL if on_device else GLOO
    if wanted == "collective":
        if not collectives:
            raise ConfigError(
                "kv_transport is collective, which --tls-dir refuses: --allow-plain-collectives allows it"
            )
        return [collective]
    if wanted == "auto":
        # gloo has no advantage over ZMQ, so it is offered only when asked for.
        local = [SHM, *([CUDA_IPC] if on_device else [])]
        return [ZMQ, *(local if one_host else []), *([NCCL] if on_device and collectives else [])]
    if wanted == SHM and not one_host:
        raise ConfigError("kv_transport is shm, which needs Linux: memory cannot be shared here")
    if wanted == CUDA_IPC and not (on_device and one_host):
        raise ConfigError("kv_transport is cuda_ipc, which needs Linux and KV on a CUDA device")
    return [wanted]


def _connector(name: str, relay: RelaySettings, storage: KVStorage, device: RelayDevice | None) -> Connector:
    match name:
        case "zmq":
            return ZmqConnector()
        case "shm":
            return ShmConnector()
        case "cuda_ipc" if device is not None:
            return CudaIpcConnector(device, storage)
        case _:
            return CollectiveConnector(
                relay.addresses.one_interface, backend=name, gpu_id=device.gpu_id if device else ""
            )


def _listener(name: str, relay: RelaySettings, storage: KVStorage, device: RelayDevice | None, port: int) -> Listener:
    match name:
        case "zmq":
            return ZmqListener(relay.addresses.host, port, seals=relay.sealed)
        case "shm":
            return ShmListener()
        case "cuda_ipc" if device is not None:
            return CudaIpcListener(device, storage)
        case _:
            return CollectiveListener(
                relay.addresses.one_interface, port, backend=name, gpu_id=device.gpu_id if device else ""
            )
