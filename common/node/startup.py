"""Starts a node of either role, from top to bottom.

run_node: plan -> processes of this host's other ranks
_serve:   control socket -> model shards on all ranks, KV memory -> transfer ends -> core -> server
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from common.base.clock import monotonic
from common.base.process import run_service
from common.cluster.loaded_adapters import read_loaded_adapters
from common.config.service_configs import NodeConfig
from common.control.admin_server import AdminRoute
from common.node.adapter_admin import AdapterAdmin, configured_sources, loaded_sources
from common.node.adapter_table import AdapterTable
from common.node.core import CoreParts
from common.node.holdings import report_holdings
from common.node.options import ServerOptions
from common.node.parts import make_grammars, make_record, make_scheduler
from common.node.plan import NodePlan, fit_memory
from common.node.ranks.adapters import NodeAdapters
from common.node.ranks.forked import ForkedRank
from common.node.ranks.launch import fork_ranks, run_other_host
from common.node.ranks.leader import Leader
from common.node.ranks.main import run_rank
from common.node.role import NodeRole
from common.node.server import NodeServer
from common.node.transfers import NodeTransfers

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=NodeConfig)

_MAX_ACCEPTED = 1024
"""Maximum number of attempts at a node at once, including waiting ones; further attempts are refused as overload."""


def run_node(role: NodeRole[ConfigT], config: ConfigT) -> None:
    """Run a node, or the ranks of a node on a host other than its leader's, until SIGTERM or SIGINT.

    Raises: ConfigError if the node cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    plan = role.plan(config)
    report_holdings(plan)
    # Fork before there is a second thread or an event loop, because neither survives a fork.
    forked = fork_ranks(plan, partial(run_rank, lambda: role))
    if 0 in plan.hosts.ranks_here:
        options = ServerOptions.of(role.name, replace(config, threads=plan.hosts.threads))
        run_service(lambda: _serve(role, options, plan, forked))
    else:
        run_service(lambda: run_other_host(role, plan, forked))


async def _serve(role: NodeRole[Any], options: ServerOptions, plan: NodePlan, forked: Sequence[ForkedRank]) -> None:
    """Run the leader of a node until cancelled. Raises: ConfigError, EngineError."""
    server = NodeServer(options)
    await server.bind()
    configured = configured_sources(plan.adapters, plan.model_config, plan.names)
    before = await read_loaded_adapters(options.redis_url, options.cluster, server.node_id, options.tls_dir)
    loaded, missing = await loaded_sources(before, configured, plan.adapters, plan.model_config, plan.names)
    grammars = make_grammars(plan, server.post)
    grammars.preload()
    leader = Leader(role, plan, forked)
    await leader.load()
    try:
        plan = fit_memory(plan, leader.num_blocks)
        incarnation = server.me.incarnation
        loader = NodeAdapters(leader.worker.adapters, plan.model_config, plan.world_size, leader.broadcast, server.post)
        adapters = AdapterTable(loader, plan.adapters.max_loras, [*configured, *loaded])
        lora = AdapterAdmin(adapters, configured, missing, plan.adapters, plan.model_config, server, plan.names)
        make_end = partial(role.transfer_end, leader.worker, 0, incarnation)
        transfers = NodeTransfers(plan.world_size, leader.broadcast, server.post, make_end)
        experts = AdminRoute("GET", "/experts", lambda call: asyncio.wrap_future(server.ask(leader.experts)))
        try:
            await leader.start_ranks(incarnation, options.addresses.advertised(transfers.end.address))
            leader.watch(server.post, transfers.on_event, server.on_crash, loader.on_report)
            me = replace(server.me, data_addresses=leader.data_addresses)
            parts = CoreParts(
                me=me,
                layout=plan.layout,
                vocab_size=plan.model.vocab_size,
                scheduler=make_scheduler(plan, leader.num_blocks),
                executor=leader.executor(transfers.end.blocks_final, server.post),
                grammars=grammars,
                send_buffer=server.send_buffer,
                clock=monotonic,
                max_accepted=_MAX_ACCEPTED,
                transfer_timeout_s=plan.relay.timeout_s,
                adapters=adapters,
            )
            await server.run(
                role.core(plan, parts, transfers),
                make_record(role.name, me, plan, leader.num_blocks, leader.worker.kernels, adapters.sources),
                parts.scheduler.pool.journal,
                on_ready=lambda: log.info("%s node %s ready at %s", role.name, me.node_id, me.control_address),
                describe=lambda: {"ranks": leader.ranks(), "relays": transfers.describe()},
                routes=[*lora.routes(), experts],
                lora=lora,
                use_idle_time=leader.worker.page_supply.use_idle_time,
            )
        finally:
            loader.close()
            transfers.close()
    finally:
        grammars.close()
        leader.close()
