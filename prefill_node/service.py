"""The prefill node's process: loads the model, then runs `PrefillNode` in the shell that all nodes share."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.base.clock import monotonic
from common.node.plan import (
    Blueprint,
    batched_tokens,
    fit_memory,
    make_record,
    make_scheduler,
    node_id_for,
    plan_node,
)
from common.node.ranks.launch import Leader, follow, share_cores
from common.node.ranks.messages import rank_codec
from common.node.server import NodeShell
from kvtransfer.node_transfers import ORDER_TYPES, RankedSender, TransferReport
from kvtransfer.transports.factory import make_sender
from prefill_node.node import PrefillNode

if TYPE_CHECKING:
    from common.config.options import PrefillConfig
    from common.node.ranks.forked import ForkedRank

log = logging.getLogger(__name__)

_MAX_ACCEPTED = 1024
CODEC = rank_codec(*ORDER_TYPES, TransferReport)


def blueprint_of(config: PrefillConfig) -> Blueprint:
    """What the node of `config` will be. Raises: ConfigError."""
    return plan_node(config)


async def serve(config: PrefillConfig, blueprint: Blueprint, forks: Sequence[ForkedRank] = ()) -> None:
    """Run until cancelled. `forks`: for the other ranks that run here; without any they are started as programs.

    Raises: ConfigError for what cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    config = share_cores(config, blueprint.world_size // config.nnodes, os.cpu_count() or 1)
    if config.node_rank > 0:
        await follow(config, "prefill", blueprint, CODEC, forks)
        return
    shell = NodeShell(config, node_id_for("prefill", config))
    await shell.bind()
    leader = Leader(config, "prefill", blueprint, CODEC, forks)
    await leader.start(small_batches=False)
    try:
        blueprint = fit_memory(blueprint, config, leader.num_blocks)
        sender = RankedSender(
            blueprint.world_size,
            leader.broadcast,
            shell.post,
            lambda on_event: make_sender(config, leader.loaded.storage, blueprint.layout, 0, on_event),
        )
        await leader.begin(shell.me.incarnation, "")
        leader.watch(shell.post, sender.on_report, shell.on_crash)
        node = PrefillNode(
            shell.me,
            blueprint.layout,
            blueprint.model.vocab_size,
            make_scheduler(config, blueprint, leader.num_blocks, prefill_chunk=batched_tokens(config, blueprint)),
            leader.executor(sender.blocks_final, shell.post),
            sender,
            shell.outbox,
            monotonic,
            max_accepted=_MAX_ACCEPTED,
            transfer_timeout_s=config.transfer_timeout_s,
        )
        try:
            await shell.run(
                node,
                make_record("prefill", shell.me, config, blueprint, leader.num_blocks),
                node.scheduler.pool.journal,
                on_ready=lambda: log.info("prefill node %s ready at %s", shell.me.node_id, shell.me.control_address),
                describe=lambda: {"ranks": leader.ranks(), "relays": sender.traffic.describe()},
            )
        finally:
            sender.close()
    finally:
        leader.close()
