"""The transports that the conformance suite runs on, and the threads that they must not leave behind."""

from __future__ import annotations

import threading
from functools import partial

from support import transports

from kvtransfer.transports.collective.connector import CollectiveConnector
from kvtransfer.transports.collective.listener import CollectiveListener
from kvtransfer.transports.shm.connector import ShmConnector
from kvtransfer.transports.shm.listener import ShmListener
from kvtransfer.transports.zmq import ZmqConnector, ZmqListener

TRANSPORTS = {
    "cuda_ipc": transports.cuda_ipc,
    "sealed-zmq": partial(transports.zmq, seals=True),
    "staged-zmq": lambda: transports.staged(
        partial(ZmqConnector, message_bytes=1024, window=4), partial(ZmqListener, "127.0.0.1", 0)
    ),
    "staged-sealed-zmq": lambda: transports.staged(
        partial(ZmqConnector, message_bytes=1024, window=4), partial(ZmqListener, "127.0.0.1", 0, seals=True)
    ),
    "staged-collective": lambda: transports.staged(
        partial(CollectiveConnector, "127.0.0.1", message_bytes=1024, window=4),
        partial(CollectiveListener, "127.0.0.1", 0),
    ),
    "staged-shm": lambda: transports.staged(partial(ShmConnector, page_bytes=1024, num_pages=4), ShmListener),
    "zmq": transports.zmq,
    "loopback": transports.loopback,
    "shm": transports.shm,
    "collective": transports.collective,
}


def relay_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("kv-")}
