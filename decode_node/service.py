"""The decode node's process: loads the model, then runs `DecodeNode` in the shell that all nodes share."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from common.base.clock import monotonic
from common.node.address import advertised
from common.node.plan import Blueprint, fit_memory, make_record, make_scheduler, node_id_for, plan_node
from common.node.ranks.launch import Leader, follow, share_cores
from common.node.ranks.messages import rank_codec
from common.node.server import NodeShell
from decode_node.node import DecodeNode
from kvtransfer.node_transfers import ORDER_TYPES, RankedReceiver, TransferReport
from kvtransfer.transports.factory import make_receiver

if TYPE_CHECKING:
    from common.config.options import DecodeConfig
    from common.node.ranks.forked import ForkedRank

log = logging.getLogger(__name__)

_MAX_ACCEPTED = 1024
CODEC = rank_codec(*ORDER_TYPES, TransferReport)


def blueprint_of(config: DecodeConfig) -> Blueprint:
    """What the node of `config` will be. Raises: ConfigError."""
    return plan_node(config, pp_size=config.pipeline_parallel_size, pp_layers=config.pp_layers)


async def serve(config: DecodeConfig, blueprint: Blueprint, forks: Sequence[ForkedRank] = ()) -> None:
    """Run until cancelled. `forks`: for the other ranks that run here; without any they are started as programs.

    Raises: ConfigError for what cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    config = share_cores(config, blueprint.world_size // config.nnodes, os.cpu_count() or 1)
    if config.node_rank > 0:
        await follow(config, "decode", blueprint, CODEC, forks)
        return
    shell = NodeShell(config, node_id_for("decode", config))
    await shell.bind()
    leader = Leader(config, "decode", blueprint, CODEC, forks)
    await leader.start(small_batches=True)
    try:
        blueprint = fit_memory(blueprint, config, leader.num_blocks)
        receiver = RankedReceiver(
            blueprint.world_size,
            leader.broadcast,
            shell.post,
            lambda on_event: make_receiver(
                config,
                leader.loaded.storage,
                blueprint.layout,
                0,
                on_event,
                port=config.data_port,
                incarnation=shell.me.incarnation,
            ),
        )
        await leader.begin(shell.me.incarnation, advertised(receiver.address, config))
        leader.watch(shell.post, receiver.on_report, shell.on_crash)
        me = replace(shell.me, data_addresses=leader.data_addresses)
        node = DecodeNode(
            me,
            blueprint.layout,
            blueprint.model.vocab_size,
            make_scheduler(config, blueprint, leader.num_blocks, prefill_chunk=config.local_prefill_chunk),
            leader.executor(post=shell.post),
            receiver,
            shell.outbox,
            monotonic,
            max_accepted=_MAX_ACCEPTED,
            transfer_timeout_s=config.transfer_timeout_s,
            early_s=config.lease_s,
        )
        try:
            await shell.run(
                node,
                make_record("decode", me, config, blueprint, leader.num_blocks),
                node.scheduler.pool.journal,
                on_ready=lambda: log.info("decode node %s ready at %s", me.node_id, me.control_address),
                describe=lambda: {"ranks": leader.ranks(), "relays": receiver.traffic.describe()},
            )
        finally:
            receiver.close()
    finally:
        leader.close()
