"""Start-up of a node of either role, from top to bottom.

run_node: plan -> processes of this host's other ranks
_serve:   control socket -> model shards on all ranks, KV memory -> transfer ends -> core -> server
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from common.base.clock import monotonic
from common.base.process import run_service
from common.cluster.address import advertised
from common.cluster.loaded_adapters import read_loaded_adapters
from common.config.fields import listed
from common.config.service_configs import NodeConfig
from common.node.adapter_admin import AdapterAdmin, configured_sources, loaded_sources
from common.node.adapter_table import AdapterTable
from common.node.core import CoreParts
from common.node.plan import NodePlan, fit_memory, make_grammars, make_record, make_scheduler, node_id_for
from common.node.ranks.adapters import NodeAdapters
from common.node.ranks.forked import ForkedRank
from common.node.ranks.launch import fork_ranks, run_other_host, share_cores
from common.node.ranks.leader import Leader
from common.node.ranks.main import run_rank
from common.node.role import NodeRole
from common.node.server import NodeServer
from common.node.transfers import NodeTransfers

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=NodeConfig)

_MAX_ACCEPTED = 1024
"""Attempts that a node holds at once, waiting ones included; further ones are refused as overload."""


def run_node(role: NodeRole[ConfigT], config: ConfigT) -> None:
    """Run a node, or the ranks of a node on a host other than its leader's, until SIGTERM or SIGINT.

    Raises: ConfigError for what cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    plan = role.plan(config)
    # Before there is a second thread or an event loop: neither survives a fork.
    forked = fork_ranks(config, plan, partial(run_rank, lambda: role))
    config = share_cores(config, plan.world_size // config.nnodes, os.cpu_count() or 1)
    if config.node_rank > 0:
        run_service(lambda: run_other_host(config, role, plan, forked))
    else:
        run_service(lambda: _serve(role, config, plan, forked))


async def _serve(role: NodeRole[ConfigT], config: ConfigT, plan: NodePlan, forked: Sequence[ForkedRank]) -> None:
    """Run until cancelled. Raises: as `run_node`."""
    server = NodeServer(config, node_id_for(role.name, config))
    await server.bind()
    names = {plan.model.name, *listed("served_model_name", config.served_model_name)}
    configured = configured_sources(config, plan.model_config, names)
    before = await read_loaded_adapters(config.redis_url, config.cluster, server.node_id, config.tls_dir)
    loaded, missing = await loaded_sources(before, configured, config, plan.model_config, names)
    grammars = make_grammars(plan, server.post)
    grammars.preload()
    leader = Leader(config, role, plan, forked)
    await leader.load()
    try:
        plan = fit_memory(plan, config, leader.num_blocks)
        incarnation = server.me.incarnation
        loader = NodeAdapters(leader.worker.adapters, plan.model_config, plan.world_size, leader.broadcast, server.post)
        adapters = AdapterTable(loader, config.max_loras, [*configured, *loaded])
        lora = AdapterAdmin(adapters, configured, missing, config, plan.model_config, server, names)
        make_end = partial(role.transfer_end, config, leader.worker, 0, incarnation)
        transfers = NodeTransfers(plan.world_size, leader.broadcast, server.post, make_end)
        try:
            await leader.start_ranks(incarnation, advertised(transfers.end.address, config))
            leader.watch(server.post, transfers.on_event, server.on_crash, loader.on_report)
            me = replace(server.me, data_addresses=leader.data_addresses)
            chunk = role.prefill_chunk(config, plan)
            parts = CoreParts(
                me=me,
                layout=plan.layout,
                vocab_size=plan.model.vocab_size,
                scheduler=make_scheduler(config, plan, leader.num_blocks, prefill_chunk=chunk),
                executor=leader.executor(transfers.end.blocks_final, server.post),
                grammars=grammars,
                send_buffer=server.send_buffer,
                clock=monotonic,
                max_accepted=_MAX_ACCEPTED,
                transfer_timeout_s=config.transfer_timeout_s,
                adapters=adapters,
            )
            await server.run(
                role.core(config, parts, transfers),
                make_record(role.name, me, config, plan, leader.num_blocks, leader.worker.kernels, adapters.adapters),
                parts.scheduler.pool.journal,
                on_ready=lambda: log.info("%s node %s ready at %s", role.name, me.node_id, me.control_address),
                describe=lambda: {"ranks": leader.ranks(), "relays": transfers.describe()},
                lora=lora,
                use_idle_time=leader.worker.page_supply.use_idle_time,
            )
        finally:
            loader.close()
            transfers.close()
    finally:
        grammars.close()
        leader.close()
