"""The decode node's process: loads the model, then runs `DecodeNode` in the shell that all nodes share."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from common.clock import monotonic
from common.engine.executor import LocalExecutor
from common.node.address import advertised
from common.node.shell import NodeShell
from common.node.startup import build_engine, node_id_for
from decode_node.node import DecodeNode
from kvtransfer.zmq import ZmqReceiver

if TYPE_CHECKING:
    from common.config import DecodeConfig

log = logging.getLogger(__name__)

_MAX_ACCEPTED = 1024


async def serve(config: DecodeConfig) -> None:
    """Run until cancelled.

    Raises: ConfigError for what cannot start, EngineError if the engine loop crashed.
    """
    shell = NodeShell(config, node_id_for("decode", config))
    await shell.bind()
    engine = await asyncio.to_thread(build_engine, config, prefill_chunk=config.local_prefill_chunk, small_batches=True)
    receiver = ZmqReceiver(
        engine.storage,
        engine.layout,
        0,
        config.host,
        config.data_port,
        shell.post,
        incarnation=shell.me.incarnation,
    )
    me = replace(shell.me, data_addresses=[advertised(receiver.address, config)])
    node = DecodeNode(
        me,
        engine.layout,
        engine.model.vocab_size,
        engine.scheduler,
        LocalExecutor(engine.runner),
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
            engine.record("decode", me),
            on_ready=lambda: log.info("decode node %s ready at %s", me.node_id, me.control_address),
        )
    finally:
        receiver.close()
