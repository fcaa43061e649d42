"""The process of a rank that is not its node's leader: connects, loads its shard, carries out orders until told to end.

The main thread computes; one thread sends life signs. A leader that is silent past its lease ends the rank, as does
any failed step: ranks share fate.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from common.base.errors import EngineError, KvRelayError, PeerLost
from common.base.torch_setup import configure_torch
from common.cluster.address import advertised, mesh_interface, rank_host
from common.config.options import NodeConfig
from common.engine.executor import LocalExecutor
from common.engine.kv_transfer import OnTransferEvent, RankTransferEnd, TransferOrder
from common.engine.step import StepInput
from common.node.plan import NodePlan, peak_memory_bytes
from common.node.ranks.messages import (
    MAX_ORDER_BYTES,
    RankBeat,
    RankBusy,
    RankCodec,
    RankFailed,
    RankHello,
    RankOrder,
    RankReady,
    RankReport,
    RankSetup,
    RankStart,
    RankStarted,
)
from common.node.worker import Worker, load_worker, own_device
from common.parallel.connect import connect_mesh

log = logging.getLogger(__name__)

OrderT = TypeVar("OrderT", RankSetup, RankStart)

_PROGRESS_EVERY_S = 5.0
_LAST_STEP_S = 1.0
"""A rank that loses its leader may take so long to end by itself: a sum with a leader that stands still never comes."""


MakeEnd = Callable[[Worker, int, str, OnTransferEvent], RankTransferEnd]
"""(worker, number of the rank, the node's incarnation, report) -> its transfer end; `report` takes any thread."""


class RankProcess:
    """One rank's sockets and main loop."""

    def __init__(self, config: NodeConfig, plan: NodePlan, rank: int, leader: str) -> None:
        self._config = config
        self._plan = plan
        self._rank = rank
        self._leader = leader
        self._codec = RankCodec()
        self._context = zmq.Context()
        self._orders = self._context.socket(zmq.PULL)
        self._orders.setsockopt(zmq.MAXMSGSIZE, MAX_ORDER_BYTES)
        self._orders.bind(f"tcp://{rank_host(config)}:*")
        self._reports = self._connect()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._executor: LocalExecutor | None = None
        self._serving_since_s = 0.0

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(self._leader)
        return socket

    def report(self, message: RankReport) -> None:
        """Send to the leader; any thread."""
        with self._lock:
            self._reports.send(self._codec.encode(message))

    def run(self, *, small_batches: bool, make_end: MakeEnd) -> None:
        """Until the leader goes. Raises: KvRelayError, after having told the leader."""
        try:
            self._run(small_batches, make_end)
        except KvRelayError as error:
            self.report(RankFailed(self._rank, error.code, error.message))
            raise
        except Exception as error:
            self.report(RankFailed(self._rank, EngineError.code, f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._ending.set()
            self._context.destroy(linger=1000)

    def _run(self, small_batches: bool, make_end: MakeEnd) -> None:
        address = self._orders.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._config.nnodes > 1:
            address = advertised(address, self._config)
        self.report(RankHello(self._rank, address))
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        setup = self._wait_for(RankSetup, "all ranks' processes must be there")
        configure_torch(self._config.threads)
        plan = self._plan
        mesh = connect_mesh(
            plan.place(self._rank),
            master_address=setup.mesh_host,
            master_port=setup.mesh_port,
            interface=mesh_interface(self._config, on_gpus=plan.device == "cuda"),
            timeout_s=self._config.rank_timeout_s,
            same_host=setup.same_host,
            device=own_device(plan, self._config, plan.place(self._rank)),
        )
        worker = load_worker(plan, self._config, mesh, small_batches=small_batches)
        self.report(RankReady(self._rank, worker.max_blocks, peak_memory_bytes()))
        start = self._wait_for(RankStart, "all ranks must have loaded their shards")
        worker.allocate_kv(start.num_blocks)
        worker.capture_graphs()
        end = make_end(worker, self._rank, start.incarnation, self.report)
        try:
            self.report(RankStarted(self._rank, advertised(end.data_address, self._config)))
            self._serve(LocalExecutor(worker.runner, end.on_blocks_final), end, worker.samples)
        finally:
            end.close()
            mesh.close()

    def _serve(self, executor: LocalExecutor, end: RankTransferEnd, samples: bool) -> None:
        """Steps on this thread; orders to transfers on another, which must not wait for a step."""
        steps: queue.SimpleQueue[StepInput | Exception] = queue.SimpleQueue()
        self._serving_since_s, self._executor = time.monotonic(), executor
        threading.Thread(target=self._take_orders, args=(steps, end), name="orders", daemon=True).start()
        while True:
            step = steps.get()
            if isinstance(step, Exception):
                raise step
            output = executor.submit(step)
            if samples:
                self.report(output)

    def _take_orders(self, steps: queue.SimpleQueue[StepInput | Exception], end: RankTransferEnd) -> None:
        # The leader's beats begin when the last rank has its memory: of an uneven split, long after the first.
        allowed_s = self._config.start_timeout_s
        try:
            while True:
                order = self._receive(allowed_s)
                allowed_s = self._config.lease_s
                if isinstance(order, StepInput):
                    steps.put(order)
                elif isinstance(order, TransferOrder):
                    end.apply(order)
        except Exception as error:  # the rank ends, on its main thread
            steps.put(error)
            if not self._ending.wait(_LAST_STEP_S):
                log.error("rank %d ends in the middle of a step that waits for other ranks: %s", self._rank, error)
                os._exit(1)

    def _wait_for(self, kind: type[OrderT], what: str) -> OrderT:
        """The leader's next order of `kind`. Raises: PeerLost when the start takes too long."""
        allowed_s = self._config.start_timeout_s
        deadline_s = time.monotonic() + allowed_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not self._orders.poll(int(1000 * min(left_s, _PROGRESS_EVERY_S))):
                log.info("rank %d waits for the leader at %s: %s", self._rank, self._leader, what)
                continue
            order = self._codec.decode(self._orders.recv())
            if isinstance(order, kind):
                return order
        raise PeerLost(f"the leader at {self._leader} did not come within {allowed_s:g} s: {what}")

    def _receive(self, timeout_s: float) -> RankOrder:
        if not self._orders.poll(int(timeout_s * 1000)):
            raise PeerLost(f"the leader at {self._leader} was silent for {timeout_s:g} s")
        return self._codec.decode(self._orders.recv())

    def _beat(self) -> None:
        socket = self._connect()
        while not self._ending.wait(self._config.lease_s / 6):
            socket.send(self._codec.encode(RankBeat(self._rank, self._busy())))
        socket.close(linger=0)

    def _busy(self) -> RankBusy:
        executor = self._executor
        return RankBusy() if executor is None else RankBusy(time.monotonic() - self._serving_since_s, executor.busy_s)
