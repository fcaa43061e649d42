"""The prefill node's process: loads the model, then runs `PrefillNode` in the shell that all nodes share."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from common.clock import monotonic
from common.engine.executor import LocalExecutor
from common.node.shell import NodeShell
from common.node.startup import build_engine, node_id_for
from kvtransfer.zmq import ZmqSender
from prefill_node.node import PrefillNode

if TYPE_CHECKING:
    from common.config import PrefillConfig

log = logging.getLogger(__name__)

_MAX_ACCEPTED = 1024


async def serve(config: PrefillConfig) -> None:
    """Run until cancelled.

    Raises: ConfigError for what cannot start, EngineError if the engine loop crashed.
    """
    shell = NodeShell(config, node_id_for("prefill", config))
    await shell.bind()
    engine = await asyncio.to_thread(
        build_engine, config, prefill_chunk=config.max_num_batched_tokens, small_batches=False
    )
    sender = ZmqSender(engine.storage, engine.layout, 0, shell.post)
    node = PrefillNode(
        shell.me,
        engine.layout,
        engine.model.vocab_size,
        engine.scheduler,
        LocalExecutor(engine.runner, sender.blocks_final),
        sender,
        shell.outbox,
        monotonic,
        max_accepted=_MAX_ACCEPTED,
        transfer_timeout_s=config.transfer_timeout_s,
    )
    try:
        await shell.run(
            node,
            engine.record("prefill", shell.me),
            on_ready=lambda: log.info("prefill node %s ready at %s", shell.me.node_id, shell.me.control_address),
        )
    finally:
        sender.close()
