"""Processes of ranks: selects those of this host, forks them, connects them; also runs a host without the leader."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Sequence

from common.base.endpoints import endpoint
from common.base.errors import RankLost
from common.control.messages import Role
from common.node.plan import NodePlan
from common.node.ranks.forked import ForkedRank, RunRank
from common.node.ranks.links import RankLinks
from common.node.ranks.messages import RankSetup
from common.node.worker import own_device
from common.parallel.connect import connect_mesh
from common.parallel.mesh import Mesh

log = logging.getLogger(__name__)


def fork_ranks(plan: NodePlan, run: RunRank) -> list[ForkedRank]:
    """A process for each rank of this host but the leader; empty where ranks cannot be forked. Must be called before
    this process has a second thread.
    """
    if plan.device != "cpu" or sys.platform != "linux":
        return []
    return [ForkedRank(run) for rank in plan.ranks_here if rank > 0]


def join_mesh(plan: NodePlan, rank: int, setup: RankSetup) -> Mesh:
    """Connect `rank` to the other ranks of its node. Blocks until all are connected. Raises: see `connect_mesh`."""
    place = plan.place(rank)
    return connect_mesh(
        place,
        master_address=setup.mesh_host,
        master_port=setup.mesh_port,
        interface=plan.addresses.for_mesh(on_gpus=plan.device == "cuda"),
        timeout_s=plan.config.rank_timeout_s,
        same_host=setup.same_host,
        device=own_device(plan, place),
    )


async def run_other_host(role: Role, plan: NodePlan, forked: Sequence[ForkedRank]) -> None:
    """Run the ranks of a host other than the leader's until one ends, then end them all.

    Raises: RankLost naming the rank that ended.
    """
    leader = endpoint("tcp", plan.config.master_addr, plan.config.master_port)
    links = RankLinks(1, "127.0.0.1", 0)  # nobody reports here: the ranks talk to the leader
    links.spawn(role, plan.ranks_here, dataclasses.asdict(plan.config), leader, forked)
    try:
        while True:
            links.check_children()
            await asyncio.sleep(0.2)
    except RankLost as error:
        log.error("%s; the other ranks of this host end with it", error)
        raise
    finally:
        links.close()
