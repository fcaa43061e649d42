"""Two ranks' own process group, and the thread that uses it: payloads in order, one at a time.

Building a group, sending and receiving block, and a peer that hangs would block them for long. They happen here,
on one thread per pair, so that only this pair waits; the I/O threads of the ends never do. The thread touches
connections' buffers, never KV blocks, and runs no operator that would start an OpenMP team.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from common.base.clock import Clock, monotonic
from common.base.errors import ConfigError, KvRelayError, PeerLost
from common.parallel.gloo import make_group
from common.parallel.nccl import interface_name
from kvtransfer.mailbox import Command
from kvtransfer.transports.choose import GLOO

log = logging.getLogger(__name__)

SENDING, RECEIVING = 0, 1
"""Ranks in the group."""
_POLL_S, _SETTLE_S = 50e-6, 1.0
_NO_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
"""By default torch ends the whole process when a peer is lost. Here only the pair ends."""
_BUILD_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds after which torch gives up the building of a communicator that does not block, which are only ours."""


@dataclass(frozen=True)
class GroupPlan:
    """How one end of a pair builds its group. The receiving end holds the store."""

    backend: str
    """`GLOO` or `NCCL`."""
    name: str
    """Of this one connection; random, so that no two meet by accident."""
    rank: int
    interface: str
    """Address of this end, which its sockets are bound to."""
    store_host: str
    timeout_s: float
    """Of building the group, of building NCCL's communicator and of each payload."""


@dataclass(frozen=True)
class _Move:
    buffer: torch.Tensor
    then: Command


class PairThread:
    """One end of one pair. All callbacks are called on its thread; after `stop` none is but `on_end`.

    `meet` begins, once the other end is about to meet us too; then payloads move in the order of `move`. `on_end` is
    called once: when the thread ends, or on another thread when it is given up because it hangs.
    """

    def __init__(self, name: str, plan: GroupPlan, *, on_ready: Command, on_end: Callable[[str], None]) -> None:
        self._plan = plan
        self._on_ready, self._on_end = on_ready, on_end
        self._queue: queue.SimpleQueue[_Move | int | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        self._connected = False
        """A payload has begun to move, so that NCCL has its communicator."""
        self._ended = threading.Lock()
        self._aborted = threading.Lock()
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def listen(self) -> int:
        """Take a port for the store; only at the end that holds it. Raises: OSError."""
        self._listener = socket.create_server((self._plan.interface, 0), backlog=8)
        return self._listener.getsockname()[1]

    def start(self) -> None:
        """Raises: RuntimeError if there is no thread to be had; then nothing is left."""
        try:
            self._thread.start()
        except RuntimeError:
            if self._listener is not None:
                self._listener.close()
            raise

    def meet(self, port: int) -> None:
        """The other end is there, and the store listens on `port`."""
        self._queue.put(port)

    def move(self, buffer: torch.Tensor, then: Command) -> None:
        """Send or receive all of `buffer`, then call `then`."""
        self._queue.put(_Move(buffer, then))

    def stop(self) -> None:
        """End after what is under way, which takes at most the plan's timeout when the other end hangs."""
        self._stopped.set()
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reason = "stopped"
        try:
            self._serve()
        except KvRelayError as error:
            reason = error.message
        except RuntimeError as error:
            # What torch.distributed raises for whatever goes wrong with a peer.
            reason = str(error).partition("\n")[0]
        except Exception as error:
            log.exception("the thread of a group failed")
            reason = f"{type(error).__name__}: {error}"
        finally:
            if self._listener is not None:
                self._listener.close()
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self._ended.acquire(blocking=False):
            self._on_end(reason)

    def _abort(self, group: Any) -> None:
        if self._aborted.acquire(blocking=False):
            group.abort()

    def _serve(self) -> None:
        store: Store | None = None
        if self._listener is not None:
            store = self._store(self._listener.getsockname()[1], self._listener.detach())
            self._listener = None
        port = self._queue.get()
        if not isinstance(port, int):
            return
        group = _make_group(self._plan, store or self._store(port, None))
        try:
            if not self._stopped.is_set():
                self._on_ready()
            while isinstance(item := self._queue.get(), _Move) and not self._stopped.is_set():
                self._transfer(group, item.buffer)
                item.then()
        finally:
            if self._plan.backend != GLOO:
                # Also what nothing is under way on holds memory of the card, and connections are made anew all the time.
                self._abort(group)

    def _store(self, port: int, listening_fd: int | None) -> Store:
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            self._plan.store_host,
            port,
            is_master=listening_fd is not None,
            timeout=timedelta(seconds=self._plan.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening_fd,
        )

    def _transfer(self, group: Any, buffer: torch.Tensor) -> None:
        if self._plan.backend == GLOO:
            self._start(group, buffer).wait(timedelta(seconds=self._plan.timeout_s))
            return
        with torch.cuda.device(buffer.device):
            self._transfer_on_card(group, buffer)

    def _transfer_on_card(self, group: Any, buffer: torch.Tensor) -> None:
        """NCCL's stream waits for what is current on this thread: one of its own, not the engine's default stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        stream = self._stream
        with torch.cuda.stream(stream):
            work = self._start_within(group, buffer)
            work.wait()  # only orders `stream` behind it
            done = torch.cuda.Event()
            done.record(stream)
        reason = wait_for_card(done.query, work.is_completed, self._plan.timeout_s)
        if reason:
            raise PeerLost(reason)

    def _start_within(self, group: Any, buffer: torch.Tensor) -> Any:
        """As `_start`; the first time NCCL builds its communicator there, and waits for the other end.

        Raises: PeerLost or RuntimeError if the other end does not come within the plan's timeout. Whatever NCCL makes of
        that, both ends of the transfer hear of it then: a thread that hangs for longer is left behind.
        """
        if self._connected:
            return self._start(group, buffer)
        reason = f"no communicator within {self._plan.timeout_s:g} s"

        def give_up() -> None:
            log.warning("%s: %s", self._thread.name, reason)
            self._end(reason)
            self._abort(group)

        timer = threading.Timer(self._plan.timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            work = self._start(group, buffer)
        finally:
            timer.cancel()
        if self._ended.locked():
            raise PeerLost(reason)
        self._connected = True
        return work

    def _start(self, group: Any, buffer: torch.Tensor) -> Any:
        if self._plan.rank == SENDING:
            return group.send([buffer], RECEIVING, 0)
        return group.recv([buffer], SENDING, 0)


def wait_for_card(
    moved: Callable[[], bool],
    is_over: Callable[[], bool],
    timeout_s: float,
    clock: Clock = monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until a payload has `moved`; gives why it never will, or nothing.

    `is_over` of NCCL's work is also true of work that failed, whose end on the card never comes.
    """
    deadline, over_since = clock() + timeout_s, None
    while not moved():
        now = clock()
        if over_since is None and is_over():
            over_since = now
        if over_since is not None and now > over_since + _SETTLE_S:
            return "NCCL lost the peer"
        if now > deadline:
            return f"a payload took longer than {timeout_s} s"
        sleep(_POLL_S)
    return ""


def _make_group(plan: GroupPlan, store: Store) -> Any:
    """Raises: RankLost, ConfigError or RuntimeError if that fails."""
    prefixed = PrefixStore(plan.name, store)
    if plan.backend == GLOO:
        return make_group(prefixed, plan.rank, [SENDING, RECEIVING], plan.interface, plan.timeout_s)
    return _make_nccl(prefixed, plan)


def _make_nccl(store: Store, plan: GroupPlan) -> Any:
    """Never run on a GPU so far. NCCL itself connects at the first payload, over this end's interface."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise ConfigError("this build of torch has no NCCL")
    for name in _NO_WATCHDOG:
        os.environ.setdefault(name, "0")
    os.environ.setdefault(_BUILD_LIMIT, str(math.ceil(plan.timeout_s)))
    if name := interface_name(plan.interface):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    options = nccl.Options()
    # Beyond every deadline of ours.
    options._timeout = timedelta(days=1)
    # Else the building of a communicator could be neither limited nor aborted.
    options.config.blocking = 0
    return nccl(store, plan.rank, 2, options)
