"""A rank other than its node's leader: connects to the other ranks, loads its shard, carries out the leader's orders.

The main thread computes, a second one receives orders, a third one sends heartbeats. A leader that is silent past its lease ends
the rank, as does any failed step: ranks share fate.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import Any, TypeVar

import zmq

from common.base.device import configure_torch
from common.base.errors import EngineError, KvRelayError, PeerLost
from common.base.free_memory import peak_memory_bytes
from common.engine.executor import LocalExecutor
from common.engine.kv_transfer import TransferEnd, TransferOrder
from common.engine.step import StepInput
from common.node.plan import NodePlan
from common.node.ranks.adapters import RankAdapters
from common.node.ranks.launch import join_mesh
from common.node.ranks.messages import (
    MAX_ORDER_BYTES,
    DropAdapter,
    LoadAdapter,
    RankBeat,
    RankBusy,
    RankCodec,
    RankExperts,
    RankFailed,
    RankHello,
    RankOrder,
    RankReady,
    RankReport,
    RankSetup,
    RankStart,
    RankStarted,
)
from common.node.ranks.sockets import RankInbox, RankOutbox, ask_leader, node_secret
from common.node.roles import NodeRole, load_role
from common.node.worker import Worker, load_worker
from common.security.sealed_endpoints import with_key

log = logging.getLogger(__name__)

OrderT = TypeVar("OrderT", RankSetup, RankStart)
_Work = StepInput | DropAdapter | RankStart | Exception

_PROGRESS_EVERY_S = 5.0
_LAST_STEP_S = 1.0
"""Time for a rank that lost its leader to end by itself. A step may never end: an all-reduce with a stopped leader does
not return."""


class RankProcess:
    """One rank's sockets and main loop."""

    def __init__(self, role: NodeRole[Any], plan: NodePlan, rank: int, leader: str) -> None:
        """`leader`: address of the leader's socket for reports."""
        self._role = role
        self._plan = plan
        self._rank = rank
        self._leader = leader
        self._codec = RankCodec()
        self._context = zmq.Context()
        self._secret = node_secret(plan.config.tls_dir)
        self._orders = RankInbox(self._context, plan.addresses.for_ranks, 0, MAX_ORDER_BYTES, self._secret)
        self._reports: RankOutbox | None = None if self._secret else RankOutbox(self._context, leader)
        """With certificates it is made once the leader has told its key."""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._end: TransferEnd
        """That of the present role."""
        self._executor: LocalExecutor | None = None
        self._serving_since_s = 0.0

    def report(self, message: RankReport) -> None:
        """Send a report to the leader. Any thread."""
        with self._lock:
            if self._reports is not None:
                self._reports.send(self._codec.encode(message))

    def run(self) -> None:
        """Run until the leader ends. Raises: KvRelayError, after reporting it to the leader."""
        try:
            self._run()
        except KvRelayError as error:
            self.report(RankFailed(self._rank, error.code, error.message))
            raise
        except Exception as error:
            self.report(RankFailed(self._rank, EngineError.code, f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._ending.set()
            self._orders.close()
            self._context.destroy(linger=1000)

    def _run(self) -> None:
        plan = self._plan
        address = self._orders.address
        if not plan.is_on_one_host:
            address = plan.addresses.advertised(address)
        leader = self._leader
        if self._secret is not None:
            timeout_s = plan.config.start_timeout_s
            leader = ask_leader(self._context, leader, self._orders, address, self._secret, timeout_s)
            self._reports = RankOutbox(self._context, leader)
        self.report(RankHello(self._rank, with_key(address, self._orders.key)))
        threading.Thread(target=self._send_heartbeats, args=(leader,), name="heartbeat", daemon=True).start()
        setup = self._wait_for(RankSetup, "blocked until all ranks have started")
        configure_torch(plan.config.threads)
        mesh = join_mesh(plan, self._rank, setup)
        worker = load_worker(plan, mesh, small_batches=self._role.small_batches)
        self.report(RankReady(self._rank, worker.max_blocks, peak_memory_bytes()))
        start = self._wait_for(RankStart, "blocked until all ranks have loaded their shards")
        worker.allocate_kv(start.num_blocks)
        worker.capture_graphs()
        adapters = RankAdapters(worker.adapters, plan.model_config, self._rank, self.report)
        executor = self._begin(start, worker)
        try:
            self._serve(executor, adapters, worker)
        finally:
            adapters.close()
            self._end.close()
            mesh.close()

    def _begin(self, start: RankStart, worker: Worker) -> LocalExecutor:
        """Open the transfer end of a role and report that. Returns what runs its steps."""
        end = self._end = load_role(start.role).transfer_end(worker, self._rank, start.incarnation, self.report)
        self._serving_since_s, self._executor = time.monotonic(), LocalExecutor(worker.runner, end.blocks_final)
        self.report(RankStarted(self._rank, self._plan.addresses.advertised(end.address)))
        return self._executor

    def _serve(self, executor: LocalExecutor, adapters: RankAdapters, worker: Worker) -> None:
        """Run steps on this thread, and transfer orders on another, because they must not wait for a step."""
        steps: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._take_orders, args=(steps, adapters), name="orders", daemon=True).start()
        wait_s: float | None = 0.0
        while True:
            try:
                step = steps.get(timeout=wait_s)
            except queue.Empty:
                wait_s = worker.page_supply.use_idle_time()
                continue
            if isinstance(step, Exception):
                raise step
            if isinstance(step, DropAdapter):
                adapters.drop(step.adapter_id)
                continue
            if isinstance(step, RankStart):  # the node is idle and changes its role
                self._end.close()
                executor = self._begin(step, worker)
                continue
            output = executor.submit(step)
            if worker.place.samples:
                self.report(output)
            experts = None if worker.rebalancer is None else worker.rebalancer.news()
            if experts is not None:
                self.report(RankExperts(self._rank, experts))

    def _take_orders(self, steps: queue.SimpleQueue[_Work], adapters: RankAdapters) -> None:
        # Heartbeats start after the slowest rank has allocated; with an uneven split that is long after the first one.
        allowed_s = self._plan.config.start_timeout_s
        try:
            while True:
                order = self._receive(allowed_s)
                allowed_s = self._plan.config.lease_s
                if isinstance(order, StepInput | DropAdapter | RankStart):
                    steps.put(order)
                elif isinstance(order, LoadAdapter):
                    adapters.load(order)
                elif isinstance(order, TransferOrder):
                    self._end.apply(order)
        except Exception as error:  # the rank ends, on its main thread
            steps.put(error)
            if not self._ending.wait(_LAST_STEP_S):
                log.error("rank %d ends during a step that waits for other ranks: %s", self._rank, error)
                os._exit(1)

    def _wait_for(self, kind: type[OrderT], what: str) -> OrderT:
        """The leader's next order of `kind`. Raises: PeerLost if the start takes too long."""
        allowed_s = self._plan.config.start_timeout_s
        deadline_s = time.monotonic() + allowed_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            order = self._next_order(min(left_s, _PROGRESS_EVERY_S))
            if order is None:
                log.info("rank %d is waiting for the leader at %s: %s", self._rank, self._leader, what)
            elif isinstance(order, kind):
                return order
        raise PeerLost(f"no order from the leader at {self._leader} within {allowed_s:g} s: {what}")

    def _receive(self, timeout_s: float) -> RankOrder:
        order = self._next_order(timeout_s)
        if order is None:
            raise PeerLost(f"the leader at {self._leader} was silent for {timeout_s:g} s")
        return order

    def _next_order(self, timeout_s: float) -> RankOrder | None:
        """The leader's next order; None if none comes in time."""
        data = self._orders.receive(timeout_s)
        return None if data is None else self._codec.decode(data)

    def _send_heartbeats(self, leader: str) -> None:
        outbox = RankOutbox(self._context, leader)
        while not self._ending.wait(self._plan.config.lease_s / 6):
            outbox.send(self._codec.encode(RankBeat(self._rank, self._busy())))
        outbox.close()

    def _busy(self) -> RankBusy:
        executor = self._executor
        return RankBusy() if executor is None else RankBusy(time.monotonic() - self._serving_since_s, executor.busy_s)
