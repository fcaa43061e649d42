"""KV over ZMQ: `ZmqSender` on every prefill rank, `ZmqReceiver` on every decode rank.

DEALER to ROUTER, one connection per pair of ranks that have something to say to each other. Each end has one
I/O thread, which owns its sockets and its state machines (`kvtransfer.ends`); frames are in `kvtransfer.wire`.
Public methods may be called by any thread: they put a command in the thread's mailbox and return.
"""

from kvtransfer.zmq_receiver import ZmqReceiver
from kvtransfer.zmq_sender import ZmqSender

__all__ = ["ZmqReceiver", "ZmqSender"]
