"""The process group of one pair of ranks, and the thread that uses it: payloads move in order, one at a time.

Building a group, sending and receiving are blocking calls, and a peer that hangs blocks them for long. They are made here,
on one thread per pair of ranks, so that only this pair waits and the I/O threads never do. The thread touches staging
buffers, never KV blocks, and runs no operator that would start an OpenMP team.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
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
from common.parallel.torch_reason import torch_reason
from kvtransfer.mailbox import Command
from kvtransfer.transports.choose import GLOO

log = logging.getLogger(__name__)

SENDING, RECEIVING = 0, 1
"""Ranks in the group."""
_POLL_S, _SETTLE_S = 50e-6, 1.0
"""Interval of checks whether a payload has moved, and how long it may still take after NCCL's work is over."""
_GRACE_S = 1.0
"""How long closing waits for threads whose peer hangs; they end at their own deadline."""
_NO_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
"""By default torch ends the whole process when a peer is lost. Here only this group ends."""
_BUILD_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds after which torch gives up building a non-blocking communicator; no other code here uses those."""


@dataclass(frozen=True)
class GroupPlan:
    """How one of the two ranks builds the group. The receiving rank holds the store."""

    backend: str
    """`GLOO` or `NCCL`."""
    name: str
    """Random and unique to this connection, so that no two connections meet by accident."""
    rank: int
    interface: str
    """Address of this host, which the sockets are bound to."""
    store_host: str
    timeout_s: float
    """Limit for building the group, for building NCCL's communicator, and for each payload."""


@dataclass(frozen=True)
class _Move:
    buffer: torch.Tensor
    then: Command


class ProcessGroupThread:
    """One rank's end of the group. All callbacks are called on its thread; after `stop` only `on_end` is called.

    `meet` starts building the group, once the other end is about to do the same; then payloads move in the order of the
    `move` calls. `on_end` is called once: when the thread ends, or on another thread when it is abandoned because it hangs.
    """

    def __init__(self, name: str, plan: GroupPlan, *, on_ready: Command, on_end: Callable[[str], None]) -> None:
        self._plan = plan
        self._on_ready, self._on_end = on_ready, on_end
        self._queue: queue.SimpleQueue[_Move | int | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        self._connected = False
        """A payload has begun to move, so NCCL has its communicator."""
        self._ended = threading.Lock()
        self._aborted = threading.Lock()
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def listen(self) -> int:
        """Listen on a free port for the store, which it returns; only at the rank that holds the store. Raises: OSError."""
        self._listener = socket.create_server((self._plan.interface, 0), backlog=8)
        return self._listener.getsockname()[1]

    def start(self) -> None:
        """Start the thread. Raises: RuntimeError if no thread can be started; then nothing is left open."""
        try:
            self._thread.start()
        except RuntimeError:
            if self._listener is not None:
                self._listener.close()
            raise

    def meet(self, port: int) -> None:
        """The other end is ready, and the store listens on `port`."""
        self._queue.put(port)

    def move(self, buffer: torch.Tensor, then: Command) -> None:
        """Send or receive all of `buffer`, then call `then`."""
        self._queue.put(_Move(buffer, then))

    def stop(self) -> None:
        """End after the current payload, which takes at most the plan's timeout when the other end hangs."""
        self._stopped.set()
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`. Returns whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reason = "stopped"
        try:
            self._serve()
        except KvRelayError as error:
            reason = error.message
        except RuntimeError as error:
            # torch.distributed raises it for every failure of a peer.
            reason = torch_reason(error)
        except Exception as error:
            log.exception("the thread of a process group failed")
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
                # An idle communicator holds GPU memory too, and connections are often made anew.
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
            self._transfer_on_gpu(group, buffer)

    def _transfer_on_gpu(self, group: Any, buffer: torch.Tensor) -> None:
        """NCCL waits for this thread's current stream, so that must be its own and not the engine's default stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        stream = self._stream
        with torch.cuda.stream(stream):
            work = self._start_within(group, buffer)
            work.wait()  # only orders `stream` behind it
            done = torch.cuda.Event()
            done.record(stream)
        reason = wait_for_payload(done.query, work.is_completed, self._plan.timeout_s)
        if reason:
            raise PeerLost(reason)

    def _start_within(self, group: Any, buffer: torch.Tensor) -> Any:
        """As `_start`. In the first call NCCL builds its communicator and waits for the other end.

        Raises: PeerLost or RuntimeError if the other end does not join within the plan's timeout. `on_end` is called at that
        time even if NCCL does not return: a thread that hangs for longer is abandoned.
        """
        if self._connected:
            return self._start(group, buffer)
        reason = f"no NCCL communicator within {self._plan.timeout_s:g} s"

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


def join_threads(threads: Iterable[ProcessGroupThread]) -> None:
    """Wait for threads that were told to stop, except those whose peer hangs."""
    deadline = time.monotonic() + _GRACE_S
    for thread in threads:
        if not thread.join(max(0.0, deadline - time.monotonic())):
            log.warning("a thread still waits for a peer that hangs; it ends at its own deadline")


def wait_for_payload(
    moved: Callable[[], bool],
    is_over: Callable[[], bool],
    timeout_s: float,
    clock: Clock = monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until a payload has `moved`. Returns the reason if it never will, else an empty string.

    `is_over` of NCCL's work is also true of work that failed and never completes on the GPU.
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
    """Build the group. Raises: RankLost, ConfigError or RuntimeError if that fails."""
    prefixed = PrefixStore(plan.name, store)
    if plan.backend == GLOO:
        return make_group(prefixed, plan.rank, [SENDING, RECEIVING], plan.interface, plan.timeout_s)
    return _make_nccl(prefixed, plan)


def _make_nccl(store: Store, plan: GroupPlan) -> Any:
    """Build an NCCL group; never run on a GPU so far. NCCL connects at the first payload, over the plan's interface."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise ConfigError("this build of torch has no NCCL")
    for name in _NO_WATCHDOG:
        os.environ.setdefault(name, "0")
    os.environ.setdefault(_BUILD_LIMIT, str(math.ceil(plan.timeout_s)))
    if name := interface_name(plan.interface):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    options = nccl.Options()
    # Longer than all our own deadlines.
    options._timeout = timedelta(days=1)
    # A blocking communicator could be neither limited in time nor aborted while it is built.
    options.config.blocking = 0
    return nccl(store, plan.rank, 2, options)
