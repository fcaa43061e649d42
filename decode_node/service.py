"""The decode node's process: loads the model, then runs `DecodeNode` in the server that all nodes share."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from common.base.clock import monotonic
from common.cluster.address import advertised
from common.node.plan import NodePlan, fit_memory, make_record, make_scheduler, node_id_for, plan_node
from common.node.ranks.launch import Leader, follow, share_cores
from common.node.server import NodeServer
from decode_node.node import DecodeNode
from kvtransfer.factory import make_receiver
from kvtransfer.node_transfers import NodeReceiver

if TYPE_CHECKING:
    from common.config.options import DecodeConfig
    from common.node.ranks.forked import ForkedRank

log = logging.getLogger(__name__)

_MAX_ACCEPTED = 1024


def plan_of(config: DecodeConfig) -> NodePlan:
    """What the node of `config` will be. Raises: ConfigError."""
    return plan_node(config, pp_size=config.pipeline_parallel_size, pp_layers=config.pp_layers)


async def serve(config: DecodeConfig, plan: NodePlan, forks: Sequence[ForkedRank] = ()) -> None:
    """Run until cancelled. `forks`: for the other ranks that run here; without any they are started as programs.

    Raises: ConfigError for what cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    config = share_cores(config, plan.world_size // config.nnodes, os.cpu_count() or 1)
    if config.node_rank > 0:
        await follow(config, "decode", plan, forks)
        return
    server = NodeServer(config, node_id_for("decode", config))
    await server.bind()
    leader = Leader(config, "decode", plan, forks)
    await leader.start(small_batches=True)
    try:
        plan = fit_memory(plan, config, leader.num_blocks)
        receiver = NodeReceiver(
            plan.world_size,
            leader.broadcast,
            server.post,
            lambda on_event: make_receiver(
                config,
                leader.worker.storage,
                plan.layout,
                0,
                on_event,
                port=config.data_port,
                incarnation=server.me.incarnation,
            ),
        )
        await leader.begin(server.me.incarnation, advertised(receiver.address, config))
        leader.watch(server.post, receiver.on_event, server.on_crash)
        me = replace(server.me, data_addresses=leader.data_addresses)
        node = DecodeNode(
            me,
            plan.layout,
            plan.model.vocab_size,
            make_scheduler(config, plan, leader.num_blocks, prefill_chunk=config.local_prefill_chunk),
            leader.executor(post=server.post),
            receiver,
            server.send_buffer,
            monotonic,
            max_accepted=_MAX_ACCEPTED,
            transfer_timeout_s=config.transfer_timeout_s,
            early_s=config.lease_s,
        )
        try:
            await server.run(
                node,
                make_record("decode", me, config, plan, leader.num_blocks),
                node.scheduler.pool.journal,
                on_ready=lambda: log.info("decode node %s ready at %s", me.node_id, me.control_address),
                describe=lambda: {"ranks": leader.ranks(), "relays": receiver.describe()},
            )
        finally:
            receiver.close()
    finally:
        leader.close()
