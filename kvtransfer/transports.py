"""The data plane's ends of one rank, with every transport that its node may use. Called once, as a node starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.config import NodeConfig
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from common.node.address import source_address
from kvtransfer.base import OnReceiverEvent, OnSenderEvent
from kvtransfer.channel import Connector, Listener
from kvtransfer.choose import GLOO, NCCL
from kvtransfer.collective import CollectiveConnector, CollectiveListener
from kvtransfer.host import host_id
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.shm import ShmConnector, ShmListener
from kvtransfer.zmq import ZmqConnector, ZmqListener

log = logging.getLogger(__name__)


def make_sender(config: NodeConfig, storage: KVStorage, layout: KVLayout, rank: int, on_event: OnSenderEvent) -> Sender:
    """A rank's `KVSender`, with the transports that `config.kv_transport` allows.

    Raises: ConfigError if there is none on this host, or one cannot work with these sizes.
    """
    connectors: list[Connector] = [_CONNECTORS[name](config) for name in _allowed(config.kv_transport, storage)]
    return Sender(storage, layout, rank, on_event, connectors, wanted=config.kv_transport)


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
    listeners: list[Listener] = []
    try:
        for name in _allowed(config.kv_transport, storage):
            listeners.append(_LISTENERS[name](config, port))
            port = 0 if name != "shm" else port
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return Receiver(storage, layout, rank, on_event, listeners, incarnation=incarnation)


def _allowed(wanted: str, storage: KVStorage) -> list[str]:
    """The transports of this end, by name. Raises: ConfigError if there is none."""
    on_device = storage.words is None
    collective = NCCL if on_device else GLOO
    shares_memory = not on_device and host_id() is not None
    if wanted == "collective":
        return [collective]
    if wanted == "auto":
        # gloo does nothing that ZMQ does not, so nobody listens for it unasked.
        return ["zmq", *(["shm"] if shares_memory else []), *([NCCL] if on_device else [])]
    if wanted == "shm" and not shares_memory:
        raise ConfigError("kv_transport is shm, but memory cannot be shared here: it needs Linux, and KV in CPU memory")
    return [wanted]


def _interface(config: NodeConfig) -> str:
    """One address of this host for the sockets of process groups, which cannot listen on every interface."""
    return source_address(config.redis_url) if config.host in ("0.0.0.0", "::", "*", "") else config.host


_CONNECTORS: dict[str, Callable[[NodeConfig], Connector]] = {
    "zmq": lambda config: ZmqConnector(),
    "shm": lambda config: ShmConnector(),
    GLOO: lambda config: CollectiveConnector(_interface(config), backend=GLOO),
    NCCL: lambda config: CollectiveConnector(_interface(config), backend=NCCL),
}
_LISTENERS: dict[str, Callable[[NodeConfig, int], Listener]] = {
    "zmq": lambda config, port: ZmqListener(config.host, port),
    "shm": lambda config, port: ShmListener(),
    GLOO: lambda config, port: CollectiveListener(_interface(config), port, backend=GLOO),
    NCCL: lambda config, port: CollectiveListener(_interface(config), port, backend=NCCL),
}
