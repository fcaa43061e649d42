"""The leader of a node's ranks: starts the others, loads its own shard, runs steps on all of them.

Runs on the leader process's asyncio loop, blocking work on a thread beside it. With one rank there are no processes, no
mesh and no links.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common.base.device import configure_torch
from common.base.endpoints import free_port
from common.base.errors import ConfigError, RankLost
from common.base.free_memory import peak_memory_bytes, resident_bytes
from common.base.process import on_own_thread
from common.control.messages import Role
from common.engine.executor import AsyncExecutor, Executor, LocalExecutor, StepDone, StepFailed
from common.engine.kv_transfer import OnBlocksFinal, OnTransferEvent, TransferEvent
from common.engine.step import StepInput, StepOutput
from common.model.mixture.placement import imbalance
from common.model.mixture.report import ExpertReport
from common.node.plan import NodePlan
from common.node.profile_run import warm_up
from common.node.ranks.forked import ForkedRank
from common.node.ranks.launch import join_mesh
from common.node.ranks.links import MultiRankExecutor, RankLinks, ReportT
from common.node.ranks.messages import (
    RankBusy,
    RankExperts,
    RankHello,
    RankLoadedAdapter,
    RankOrder,
    RankReady,
    RankReport,
    RankSetup,
    RankStart,
    RankStarted,
)
from common.node.ranks.sockets import node_secret
from common.node.roles import NodeRole
from common.node.worker import Worker, load_worker
from common.parallel.mesh import SOLO

log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""Added to the deadline of the whole start: waits for single ranks fail first, because their errors name the ranks."""


@dataclasses.dataclass(frozen=True)
class _Watch:
    """Where reports of the other ranks go."""

    post: Callable[[StepDone], None]
    on_transfer: OnTransferEvent
    on_dead: Callable[[BaseException], None]
    on_adapter: Callable[[RankLoadedAdapter], None]


class Leader:
    """Rank 0 of a node and its links to the others. Use: `load`; in each role `start_ranks`, `watch`, `executor`; `close` at the
    end."""

    def __init__(self, role: NodeRole[Any], plan: NodePlan, forked: Sequence[ForkedRank] = ()) -> None:
        """Starts the processes of this host's other ranks, in `forked` if that is not empty."""
        self._plan = plan
        self._small_batches = role.small_batches
        self._since_s = time.monotonic()
        self.links: RankLinks | None = None
        if plan.world_size > 1:
            config = plan.config
            self.links = links = RankLinks(plan.world_size, self._host, config.master_port, node_secret(config.tls_dir))
            links.spawn(role.name, plan.ranks_here[1:], dataclasses.asdict(config), links.address, forked)
        self.worker: Worker
        self._rank_blocks = 0
        self.data_addresses: list[str] = []
        """One address for each rank that receives, in rank order."""
        self._local: LocalExecutor | None = None
        self._ranks: LocalExecutor | MultiRankExecutor | None = None
        self._outputs: AsyncExecutor | None = None
        self._serving_since_s = 0.0
        self._experts: dict[int, ExpertReport] = {}
        """The latest report of each pipeline stage but the first, by the rank that made it."""
        self._watch: _Watch | None = None
        self._again: queue.SimpleQueue[RankStarted | BaseException] = queue.SimpleQueue()
        """Reports of ranks that have changed their role, and why a rank has ended."""
        self._dead: BaseException | None = None

    @property
    def num_blocks(self) -> int:
        """KV blocks of the node. Context- and data-parallel ranks hold different blocks, other ranks parts of the same blocks."""
        return self._plan.layout.pool_blocks(self._rank_blocks)

    @property
    def _host(self) -> str:
        """The leader's address for the other ranks."""
        plan = self._plan
        return plan.addresses.for_ranks if plan.is_on_one_host else plan.config.master_addr

    async def load(self) -> None:
        """Load every shard, agree on the number of KV blocks of a rank (that of the rank with the least room), and allocate the
        leader's own.

        Raises: ConfigError or a rank's error, naming the ranks at fault or missing; ConfigError after `start_timeout_s`.
        """
        # On this thread, because the engine's thread inherits its floating-point environment.
        configure_torch(self._plan.config.threads)
        try:
            await self._before_deadline(self._load if self.links is None else self._load_with_others)
        except BaseException:
            self.close()
            raise

    async def _before_deadline(self, work: Callable[[], None]) -> None:
        """Run `work` beside the loop. Raises: ConfigError after the start's deadline; what `work` raises."""
        timeout_s = self._plan.config.start_timeout_s
        grace_s = 0.0 if self.links is None else _GRACE_S
        deadline = asyncio.timeout(self._since_s + timeout_s + grace_s - time.monotonic())
        try:
            async with deadline:
                await on_own_thread(work, "start")
        except BaseException:
            if deadline.expired():
                raise ConfigError(
                    f"the model was not loaded within {timeout_s:g} s; raise --start-timeout-s to allow more"
                ) from None
            raise

    def _collect(self, links: RankLinks, kind: type[ReportT], what: str) -> dict[int, ReportT]:
        """One report of `kind` from every other rank, before the start's deadline. Raises: see `RankLinks.collect`."""
        return links.collect(kind, self._plan.config.start_timeout_s, what, since_s=self._since_s)

    def _load(self) -> None:
        self.worker = load_worker(self._plan, SOLO, small_batches=self._small_batches)
        self._rank_blocks = self.worker.max_blocks
        self.worker.allocate_kv(self._rank_blocks)
        self.worker.capture_graphs()
        self.worker.runner.execute(warm_up(self._plan.layout.spec.num_tables))
        self._log_memory()

    def _load_with_others(self) -> None:
        links, plan = self.links, self._plan
        assert links is not None
        self._collect(links, RankHello, "their processes are starting")
        setup = RankSetup(self._host, free_port(), plan.is_on_one_host)
        links.broadcast(setup)
        with links.prefer_rank_error():
            mesh = join_mesh(plan, 0, setup)
            self.worker = load_worker(plan, mesh, small_batches=self._small_batches)
        ready = self._collect(links, RankReady, "they are loading their shards")
        self._rank_blocks = min(self.worker.max_blocks, *(report.max_blocks for report in ready.values()))
        self.worker.allocate_kv(self._rank_blocks)
        self._log_memory(ready.values())

    def _log_memory(self, others: Iterable[RankReady] = ()) -> None:
        own = RankReady(0, self.worker.max_blocks, peak_memory_bytes())
        for report in sorted((own, *others), key=lambda report: report.rank):
            log.info(
                "%s: peak memory %.2f GB while loading, room for %d KV blocks",
                self._plan.place(report.rank),
                report.peak_bytes / 1e9,
                report.max_blocks,
            )
        spec = self._plan.layout.spec
        log.info(
            "model %s, %s, %d KV blocks (%.2f GB, %d tokens)",
            self._plan.model.name,
            spec.dtype,
            self.num_blocks,
            self.num_blocks / spec.num_tables * spec.bytes_per_block / 1e9,
            self.num_blocks // spec.num_tables * spec.block_size,
        )

    async def start_ranks(self, role: Role, incarnation: str, own_data_address: str) -> None:
        """Have the other ranks open their transfer ends in a role, and the first time allocate KV memory before. `data_addresses`
        is complete after it.

        Raises: the first time see `load`; later RankLost, or the error of a rank.
        """
        self.data_addresses = [own_data_address] if own_data_address else []
        links = self.links
        if links is None:
            return
        started: dict[int, RankStarted] = {}

        def first() -> None:
            self.worker.capture_graphs()
            started.update(self._collect(links, RankStarted, "they are opening their transfer ends"))

        links.broadcast(RankStart(role, self._rank_blocks, incarnation))
        if self._watch is None:
            await self._before_deadline(first)
        else:
            await on_own_thread(lambda: started.update(self._started_again()), "start")
        self.data_addresses += [report.data_address for _, report in sorted(started.items()) if report.data_address]

    def _started_again(self) -> dict[int, RankStarted]:
        """A report from every other rank that it has the new role. Raises: RankLost, or the error of a rank."""
        started: dict[int, RankStarted] = {}
        timeout_s = self._plan.config.rank_timeout_s
        until_s = time.monotonic() + timeout_s
        while missing := [rank for rank in range(1, self._plan.world_size) if rank not in started]:
            try:
                report = self._again.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise RankLost(f"ranks {missing} have not changed their role within {timeout_s:g} s") from None
            if isinstance(report, BaseException):
                raise report
            started[report.rank] = report
        return started

    def broadcast(self, order: RankOrder) -> None:
        """Send an order to every other rank, if there are any. Any thread."""
        if self.links is not None:
            self.links.broadcast(order)

    def executor(
        self, on_blocks_final: OnBlocksFinal | None = None, post: Callable[[StepDone | StepFailed], None] | None = None
    ) -> Executor:
        """An executor over all ranks, in place of an earlier one. With asynchronous scheduling, outputs of steps go to `post`."""
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None
        self._serving_since_s = time.monotonic()
        local = self._local = LocalExecutor(self.worker.runner, on_blocks_final)
        links = self.links
        ranks: LocalExecutor | MultiRankExecutor = local
        if links is not None:
            rebalances = self._plan.experts.threshold is not None
            ranks = MultiRankExecutor(links, local, samples_here=self.worker.place.samples, rebalances=rebalances)
        self._ranks = ranks
        if post is None or self._plan.steps.depth == 1:
            return ranks
        self._outputs = AsyncExecutor(ranks.start, post)
        return self._outputs

    def run_head(self, step: StepInput) -> StepOutput:
        """Run a step of the draft head on all ranks, in turn with those of `executor`, and wait for it. Engine thread.

        Raises: EngineError, RankLost.
        """
        assert self._ranks is not None
        return self._ranks.start(step).wait()

    def watch(
        self,
        post: Callable[[StepDone], None],
        on_transfer: OnTransferEvent,
        on_dead: Callable[[BaseException], None],
        on_adapter: Callable[[RankLoadedAdapter], None],
    ) -> None:
        """From now on pass on the other ranks' reports, on a thread of its own: outputs of steps go to `post`, transfer
        events to `on_transfer`, answers to `LoadAdapter` to `on_adapter`; the end of any rank goes to `on_dead`, also one between
        `start_ranks` and this call. A later call replaces an earlier one."""
        is_first, self._watch = self._watch is None, _Watch(post, on_transfer, on_dead, on_adapter)
        if self.links is not None and is_first:
            self.links.run(self._on_report, self._on_dead, self._plan.config.lease_s)
        elif self._dead is not None:
            on_dead(self._dead)

    def _on_report(self, report: RankReport) -> None:
        watch = self._watch
        assert watch is not None
        if isinstance(report, StepOutput):
            watch.post(StepDone(report))
        elif isinstance(report, TransferEvent):
            watch.on_transfer(report)
        elif isinstance(report, RankLoadedAdapter):
            watch.on_adapter(report)
        elif isinstance(report, RankExperts):
            self._experts[report.rank] = report.report
        elif isinstance(report, RankStarted):
            self._again.put(report)

    def _on_dead(self, error: BaseException) -> None:
        assert self._watch is not None
        self._dead = error  # before `_watch` is read: `watch` writes that first
        self._again.put(error)
        self._watch.on_dead(error)

    def busy(self) -> list[RankBusy]:
        """How busy each rank has been since `executor`, the other ranks as of their latest heartbeat. Any thread."""
        if self._local is None:
            return []
        own = RankBusy(time.monotonic() - self._serving_since_s, self._local.busy_s)
        return [own, *(busy for _, busy in sorted(self.links.busy.items()))] if self.links is not None else [own]

    def ranks(self) -> list[dict[str, Any]]:
        """For operators: each rank's place, process, memory and how busy it has been. Any thread.

        Pid and memory are known of ranks on this host only.
        """
        pids = {0: os.getpid(), **(self.links.pids() if self.links is not None else {})}
        return [
            {
                "rank": rank,
                "place": str(self._plan.place(rank)),
                "pid": pids.get(rank),
                "memory_bytes": resident_bytes(pids[rank]) if rank in pids else None,
                "kv_blocks": self.num_blocks,
                "busy_s": round(busy.busy_s, 1),
                "up_s": round(busy.up_s, 1),
            }
            for rank, busy in enumerate(self.busy())
        ]

    def experts(self) -> dict[str, Any]:
        """For operators: the loads and slots of experts on each rank, and the last plans. Engine thread."""
        rebalancer = self.worker.rebalancer
        own = [] if rebalancer is None else [rebalancer.report()]
        reports = own + [report for _, report in sorted(self._experts.items())]
        return {
            "threshold": self._plan.experts.threshold,
            "redundant": self._plan.experts.redundant,
            "layers": [
                {**vars(layer), "max_over_mean": round(imbalance(layer.loads), 3)}
                for report in reports
                for layer in report.layers
            ],
            "plans": [vars(plan) for report in reports for plan in report.plans],
            "pending": sum(report.pending for report in reports),
        }

    def close(self) -> None:
        """End the other ranks and release the packed weights."""
        if self._outputs is not None:
            self._outputs.close()
        if self.links is not None:
            if self._local is not None:
                log.info(
                    "busy time of each rank: %s", ", ".join(f"{b.busy_s:.1f} of {b.up_s:.1f} s" for b in self.busy())
                )
            self.links.close()
        if hasattr(self, "worker"):
            self.worker.mesh.close()
            self.worker.close()
