"""The prefill node's process: loads the model, then runs `PrefillNode` in the server that all nodes share."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.base.clock import monotonic
from common.node.plan import (
    NodePlan,
    batched_tokens,
    fit_memory,
    make_record,
    make_scheduler,
    node_id_for,
    plan_node,
)
from common.node.ranks.launch import Leader, follow, share_cores
from common.node.server import NodeServer
from kvtransfer.factory import make_sender
from kvtransfer.node_transfers import NodeSender
from prefill_node.node import PrefillNode

if TYPE_CHECKING:
    from common.config.options import PrefillConfig
    from common.node.ranks.forked import ForkedRank

log = logging.getLogger(__name__)

_MAX_ACCEPTED = 1024


def plan_of(config: PrefillConfig) -> NodePlan:
    """What the node of `config` will be. Raises: ConfigError."""
    return plan_node(config)


async def serve(config: PrefillConfig, plan: NodePlan, forks: Sequence[ForkedRank] = ()) -> None:
    """Run until cancelled. `forks`: for the other ranks that run here; without any they are started as programs.

    Raises: ConfigError for what cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    config = share_cores(config, plan.world_size // config.nnodes, os.cpu_count() or 1)
    if config.node_rank > 0:
        await follow(config, "prefill", plan, forks)
        return
    server = NodeServer(config, node_id_for("prefill", config))
    await server.bind()
    leader = Leader(config, "prefill", plan, forks)
    await leader.start(small_batches=False)
    try:
        plan = fit_memory(plan, config, leader.num_blocks)
        sender = NodeSender(
            plan.world_size,
            leader.broadcast,
            server.post,
            lambda on_event: make_sender(config, leader.worker.storage, plan.layout, 0, on_event),
        )
        await leader.begin(server.me.incarnation, "")
        leader.watch(server.post, sender.on_event, server.on_crash)
        node = PrefillNode(
            server.me,
            plan.layout,
            plan.model.vocab_size,
            make_scheduler(config, plan, leader.num_blocks, prefill_chunk=batched_tokens(config, plan)),
            leader.executor(sender.blocks_final, server.post),
            sender,
            server.send_buffer,
            monotonic,
            max_accepted=_MAX_ACCEPTED,
            transfer_timeout_s=config.transfer_timeout_s,
        )
        try:
            await server.run(
                node,
                make_record("prefill", server.me, config, plan, leader.num_blocks),
                node.scheduler.pool.journal,
                on_ready=lambda: log.info("prefill node %s ready at %s", server.me.node_id, server.me.control_address),
                describe=lambda: {"ranks": leader.ranks(), "relays": sender.describe()},
            )
        finally:
            sender.close()
    finally:
        leader.close()
