"""Makes the transfer end of one rank with all transports that its node may use. Called once, when a node starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.base.errors import ConfigError
from common.cluster.address import HostAddresses
from common.config.service_configs import NodeConfig
from common.engine.kv_transfer import OnTransferEvent
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.copy.cuda import CudaDevice
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
    config: NodeConfig,
    storage: KVStorage,
    layout: KVLayout,
    rank: int,
    on_event: OnTransferEvent,
    *,
    incarnation: str,
    listen_port: int | None = None,
) -> TransferEnd:
    """A rank's transfer end, with the transports that `kv_transport` allows.

    listen_port: where the first transport that needs a port listens for KV; 0 means any free one. None: this rank only
    sends, and opens no listening socket.

    Raises: ConfigError if this host has none of them, one cannot listen, or one does not support these sizes.
    """
    device = None if storage.host_bytes is not None else CudaDevice(storage)
    names = _allowed(config.kv_transport, storage, collectives=config.may_use_collectives)
    transports = [_transport(name, config, storage, device) for name in names]
    connectors = [connector for connector, _ in transports]
    listeners: list[Listener] = []
    try:
        for name, (_, listen) in zip(names, transports, strict=True) if listen_port is not None else ():
            listeners.append(listen(listen_port or 0))
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
        wanted=config.kv_transport,
    )


def _allowed(wanted: str, storage: KVStorage, *, collectives: bool) -> list[str]:
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


def _transport(
    name: str, config: NodeConfig, storage: KVStorage, device: CudaDevice | None
) -> tuple[Connector, Callable[[int], Listener]]:
    """A transport's connector, and what makes its listener at a port."""
    match name:
        case "zmq":
            return ZmqConnector(), lambda port: ZmqListener(config.host, port, seals=config.tls_dir is not None)
        case "shm":
            return ShmConnector(), lambda port: ShmListener()
        case "cuda_ipc" if device is not None:
            return CudaIpcConnector(device, storage), lambda port: CudaIpcListener(device, storage)
        case _:
            interface, gpu_id = HostAddresses.of(config).one_interface, device.gpu_id if device else ""
            connector = CollectiveConnector(interface, backend=name, gpu_id=gpu_id)
            return connector, lambda port: CollectiveListener(interface, port, backend=name, gpu_id=gpu_id)
