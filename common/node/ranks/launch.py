"""Processes of ranks: selects those of this host, forks them, connects them; also runs a host without the leader."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from common.base.counted import counted
from common.base.endpoints import endpoint
from common.base.errors import ConfigError, RankLost
from common.cluster.address import mesh_interface
from common.config.service_configs import NodeConfig
from common.node.plan import NodePlan
from common.node.ranks.forked import ForkedRank, RunRank
from common.node.ranks.links import RankLinks
from common.node.ranks.messages import RankSetup
from common.node.role import NodeRole
from common.node.worker import own_device
from common.parallel.connect import connect_mesh
from common.parallel.mesh import Mesh

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=NodeConfig)


def share_cores(config: ConfigT, ranks_here: int, cores: int) -> ConfigT:
    """`config` with an equal share of the cores as `threads`, if there are several ranks on this host."""
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
            f"{counted(world_size, 'rank')} cannot be spread evenly over {counted(config.nnodes, 'host')} (this is host "
            f"{config.node_rank})"
        )
    if config.nnodes > 1 and _is_loopback(config.host) and not _is_loopback(config.master_addr):
        raise ConfigError(f"ranks on other hosts cannot reach {config.host}: set --host to an address of this host")
    each = world_size // config.nnodes
    return range(config.node_rank * each, (config.node_rank + 1) * each)


def fork_ranks(config: NodeConfig, plan: NodePlan, run: RunRank) -> list[ForkedRank]:
    """A process for each rank of this host but the leader; empty where ranks cannot be forked. Must be called before
    this process has a second thread.

    Raises: ConfigError if the ranks do not spread evenly.
    """
    if plan.device != "cpu" or sys.platform != "linux":
        return []
    return [ForkedRank(run) for rank in ranks_of_host(config, plan.world_size) if rank > 0]


def join_mesh(config: NodeConfig, plan: NodePlan, rank: int, setup: RankSetup) -> Mesh:
    """Connect `rank` to the other ranks of its node. Blocks until all are connected. Raises: see `connect_mesh`."""
    place = plan.place(rank)
    return connect_mesh(
        place,
        master_address=setup.mesh_host,
        master_port=setup.mesh_port,
        interface=mesh_interface(config, on_gpus=plan.device == "cuda"),
        timeout_s=config.rank_timeout_s,
        same_host=setup.same_host,
        device=own_device(plan, config, place),
    )


async def run_other_host(config: NodeConfig, role: NodeRole[Any], plan: NodePlan, forked: Sequence[ForkedRank]) -> None:
    """Run the ranks of a host other than the leader's until one ends, then end them all.

    Raises: RankLost naming the rank that ended.
    """
    ranks = ranks_of_host(config, plan.world_size)
    links = RankLinks(1, "127.0.0.1", 0)  # nobody reports here: the ranks talk to the leader
    links.spawn(type(role).__module__, ranks, config, endpoint("tcp", config.master_addr, config.master_port), forked)
    try:
        while True:
            links.check_children()
            await asyncio.sleep(0.2)
    except RankLost as error:
        log.error("%s; the other ranks of this host end with it", error)
        raise
    finally:
        links.close()
