"""Start-up of a node from its leader: the other ranks' processes, the mesh between all, every shard, KV memory.

Runs on the leader's asyncio loop, blocking work on a thread beside it. With one rank there are no processes, no
mesh and no links.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from common.base.errors import ConfigError, RankLost
from common.base.process import on_own_thread
from common.base.torch_setup import configure_torch
from common.cluster.address import mesh_interface, rank_host
from common.cluster.redis_server import free_port
from common.config.options import NodeConfig
from common.control.messages import Role
from common.engine.executor import AsyncExecutor, Executor, LocalExecutor, StepDone
from common.engine.kv_transfer import OnBlocksFinal, OnTransferEvent, TransferEvent
from common.engine.step import StepOutput
from common.node.plan import WARM_UP, NodePlan, peak_memory_bytes, resident_bytes, steps_ahead
from common.node.ranks.forked import ForkedRank, RunRank
from common.node.ranks.links import MultiRankExecutor, RankLinks
from common.node.ranks.messages import (
    RankBusy,
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
from common.parallel.mesh import SOLO

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=NodeConfig)
ReportT = TypeVar("ReportT", RankHello, RankReady, RankStarted)

_NAMING_S = 5.0
"""So much later than the waits for single ranks a start ends as a whole: they can say who is missing."""


def share_cores(config: ConfigT, ranks_here: int, cores: int) -> ConfigT:
    """Ranks that always run together get cores of their own; one rank alone may use all."""
    if config.threads is not None or ranks_here == 1:
        return config
    return replace(config, threads=max(1, cores // ranks_here))


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def ranks_of_host(config: NodeConfig, world_size: int) -> range:
    """The ranks that run on this host.

    Raises: ConfigError if the ranks do not spread evenly.
    """
    if world_size % config.nnodes or not 0 <= config.node_rank < config.nnodes:
        raise ConfigError(
            f"{world_size} ranks do not spread evenly over {config.nnodes} hosts, this being {config.node_rank}"
        )
    if config.nnodes > 1 and _is_loopback(config.host) and not _is_loopback(config.master_addr):
        raise ConfigError(f"the ranks of other hosts cannot reach {config.host}: give --host an address of this host")
    each = world_size // config.nnodes
    return range(config.node_rank * each, (config.node_rank + 1) * each)


def fork_ranks(config: NodeConfig, plan: NodePlan, run: RunRank) -> list[ForkedRank]:
    """A process for each other rank on this host, where ranks can be forked. Call it before there is a second thread.

    Raises: ConfigError if the ranks do not spread evenly.
    """
    if plan.device != "cpu" or sys.platform != "linux":
        return []
    return [ForkedRank(run) for rank in ranks_of_host(config, plan.world_size) if rank > 0]


class Leader:
    """Rank 0 of a node and its links to the others. Use: `start`, then `begin`, then `executor`; `close` at the end."""

    def __init__(self, config: NodeConfig, role: Role, plan: NodePlan, forks: Sequence[ForkedRank] = ()) -> None:
        """`forks`: of `fork_ranks`."""
        self._config = config
        self._plan = plan
        self._since_s = time.monotonic()
        self.links: RankLinks | None = None
        if plan.world_size > 1:
            ranks = ranks_of_host(config, plan.world_size)
            host = config.master_addr if config.nnodes > 1 else rank_host(config)
            self.links = RankLinks(plan.world_size, host, config.master_port)
            self.links.spawn(role, ranks[1:], config, self.links.address, forks)
        self.worker: Worker
        self.num_blocks = 0
        self.data_addresses: list[str] = []
        self._local: LocalExecutor | None = None
        self._outputs: AsyncExecutor | None = None
        self._serving_since_s = 0.0

    async def start(self, *, small_batches: bool) -> None:
        """Load every shard and agree on the number of KV blocks: the smallest rank's.

        Raises: ConfigError or a rank's error, naming the ranks at fault or missing; ConfigError after `start_timeout_s`.
        """
        # On this thread, because the engine's thread inherits its floating-point environment.
        configure_torch(self._config.threads)
        try:
            await self._within_start(lambda: self._start(small_batches))
        except BaseException:
            self.close()
            raise

    async def _within_start(self, work: Callable[[], None]) -> None:
        """Run `work` beside the loop. Raises: ConfigError if it is not done when the start must be; what `work` raises."""
        timeout_s = self._config.start_timeout_s
        grace_s = 0.0 if self.links is None else _NAMING_S
        deadline = asyncio.timeout(self._since_s + timeout_s + grace_s - time.monotonic())
        try:
            async with deadline:
                await on_own_thread(work, "start")
        except BaseException:
            if deadline.expired():
                raise ConfigError(
                    f"the model was not loaded within {timeout_s:g} s; --start-timeout-s allows more"
                ) from None
            raise

    def _collect(self, links: RankLinks, kind: type[ReportT], what: str) -> dict[int, ReportT]:
        """Raises: as `RankLinks.collect`, if they do not come while the start may take."""
        return links.collect(kind, self._config.start_timeout_s, what, since_s=self._since_s)

    def _start(self, small_batches: bool) -> None:
        links, config = self.links, self._config
        if links is None:
            self.worker = load_worker(self._plan, config, SOLO, small_batches=small_batches)
            self.num_blocks = self.worker.max_blocks
            self.worker.allocate_kv(self.num_blocks)
            self.worker.capture_graphs()
            self.worker.runner.execute(WARM_UP)
        else:
            self._collect(links, RankHello, "their processes are starting")
            same_host = config.nnodes == 1
            setup = RankSetup(config.master_addr if config.nnodes > 1 else rank_host(config), free_port(), same_host)
            links.broadcast(setup)
            with links.last_words():  # why nobody came to meet this rank
                mesh = connect_mesh(
                    self._plan.place(0),
                    master_address=setup.mesh_host,
                    master_port=setup.mesh_port,
                    interface=mesh_interface(config, on_gpus=self._plan.device == "cuda"),
                    timeout_s=config.rank_timeout_s,
                    same_host=same_host,
                    device=own_device(self._plan, config, self._plan.place(0)),
                )
                self.worker = load_worker(self._plan, config, mesh, small_batches=small_batches)
            ready = self._collect(links, RankReady, "they load their shards")
            self.num_blocks = min(self.worker.max_blocks, *(report.max_blocks for report in ready.values()))
            for rank, report in sorted(ready.items()):
                place = self._plan.place(rank)
                log.info(
                    "%s: %.2f GB at its peak, room for %d KV blocks", place, report.peak_bytes / 1e9, report.max_blocks
                )
            self.worker.allocate_kv(self.num_blocks)
        log.info(self.worker.describe(peak_memory_bytes()))
        layout = self._plan.layout
        log.info(
            "model %s, %s, %d KV blocks (%.2f GB, %d tokens)",
            self._plan.model.name,
            layout.dtype,
            self.num_blocks,
            self.num_blocks * layout.bytes_per_block / 1e9,
            self.num_blocks * layout.block_size,
        )

    async def begin(self, incarnation: str, own_data_address: str) -> None:
        """Have the other ranks open their transfer ends. `data_addresses` is complete after it.

        Raises: as `start`.
        """
        self.data_addresses = [own_data_address]
        links = self.links
        if links is None:
            return

        def open_ends() -> None:
            self.worker.capture_graphs()
            started = self._collect(links, RankStarted, "they open their transfer ends")
            self.data_addresses += [report.data_address for _, report in sorted(started.items())]

        links.broadcast(RankStart(self.num_blocks, incarnation))
        await self._within_start(open_ends)

    def broadcast(self, order: RankOrder) -> None:
        """Send an order to every other rank, if there are any. Any thread."""
        if self.links is not None:
            self.links.broadcast(order)

    def executor(
        self, on_blocks_final: OnBlocksFinal | None = None, post: Callable[[object], None] | None = None
    ) -> Executor:
        """Runs steps on all ranks. Where the next one is prepared while one runs, their outputs go to `post`."""
        self._serving_since_s = time.monotonic()
        local = self._local = LocalExecutor(self.worker.runner, on_blocks_final)
        links = self.links
        ranks = local if links is None else MultiRankExecutor(links, local, samples_here=self.worker.samples)
        if post is None or steps_ahead(self._config, self._plan) == 1:
            return ranks
        self._outputs = AsyncExecutor(ranks, post)
        return self._outputs

    def busy(self) -> list[RankBusy]:
        """How busy each rank has been since `executor`, the other ranks as of their last beat. Any thread."""
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

    def watch(
        self,
        post: Callable[[object], None],
        on_transfer: OnTransferEvent,
        on_dead: Callable[[BaseException], None],
    ) -> None:
        """From now on hear the other ranks: outputs of steps go to `post`, what their transfer ends say to
        `on_transfer`, and any one's end is the node's. On a thread of its own."""

        def on_report(report: RankReport) -> None:
            if isinstance(report, StepOutput):
                post(StepDone(report))
            elif isinstance(report, TransferEvent):
                on_transfer(report)

        if self.links is not None:
            self.links.run(on_report, on_dead, self._config.lease_s)

    def close(self) -> None:
        """End the other ranks."""
        if self._outputs is not None:
            self._outputs.close()
        if self.links is not None:
            if self._local is not None:
                log.info("ranks computed %s", ", ".join(f"{b.busy_s:.1f} of {b.up_s:.1f} s" for b in self.busy()))
            self.links.close()
            if hasattr(self, "worker"):
                self.worker.mesh.close()


async def follow(config: NodeConfig, role: Role, plan: NodePlan, forks: Sequence[ForkedRank] = ()) -> None:
    """A host whose ranks belong to a leader elsewhere: run them until one ends, then end them all.

    Raises: RankLost naming the rank that ended.
    """
    ranks = ranks_of_host(config, plan.world_size)
    links = RankLinks(1, "127.0.0.1", 0)  # nobody reports here: the ranks talk to the leader
    links.spawn(role, ranks, config, f"tcp://{config.master_addr}:{config.master_port}", forks)
    try:
        while True:
            links.check_children()
            await asyncio.sleep(0.2)
    except RankLost as error:
        log.error("%s; the other ranks of this host end with it", error)
        raise
    finally:
        links.close()
