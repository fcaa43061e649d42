"""Starts a node of either role, from top to bottom.

run_node: plan -> processes of this host's other ranks
_Node:    control socket -> model shards on all ranks, KV memory -> in each role anew: transfer ends -> core -> server
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from common.base.clock import monotonic
from common.base.errors import EngineError
from common.base.process import run_service
from common.base.sentences import counted
from common.cluster.desired_state import OTHER
from common.cluster.runtime_changes import FlipLock, read_loaded_adapters
from common.control.admin_server import AdminRoute
from common.control.messages import PeerRef, Role
from common.engine.grammar.compiler import GrammarCompiler
from common.engine.step import HandedOn, StepInput, StepOutput, with_handed_on
from common.kv.pool import BlockPool
from common.node.adapter_admin import AdapterAdmin, configured_sources, loaded_sources
from common.node.adapter_table import AdapterTable
from common.node.admin import NodeAdmin
from common.node.core import CoreParts
from common.node.flip import FlipAdmin, Part
from common.node.holdings import report_holdings
from common.node.parts import make_grammars, make_pool, make_record, make_scheduler
from common.node.plan import NodePlan, fit_memory
from common.node.ranks.adapters import NodeAdapters
from common.node.ranks.forked import ForkedRank
from common.node.ranks.launch import fork_ranks, run_other_host
from common.node.ranks.leader import Leader
from common.node.ranks.main import run_rank
from common.node.roles import NodeRoles, load_role
from common.node.server import NodeServer
from common.node.transfers import NodeTransfers

log = logging.getLogger(__name__)

_MAX_ACCEPTED = 1024
"""Maximum number of attempts at a node at once, including waiting ones; further attempts are refused as overload."""


def run_node(roles: NodeRoles, role_name: Role) -> None:
    """Run a node, or the ranks of a node on a host other than its leader's, until SIGTERM or SIGINT. It begins in the role
    `role_name`.

    Raises: ConfigError if the node cannot start, EngineError if the engine loop crashed or a rank was lost.
    """
    role = load_role(role_name)
    plan = role.plan(roles.config(role_name))
    report_holdings(plan)
    # Fork before there is a second thread or an event loop, because neither survives a fork.
    forked = fork_ranks(plan, partial(run_rank, role_name))
    if 0 in plan.ranks_here:
        run_service(lambda: _Node(roles, Part(role, plan), forked).run())
    else:
        run_service(lambda: run_other_host(role_name, plan, forked))


class _Node:
    """The leader of a node: what it keeps when it changes its role, and what it has in one role only."""

    def __init__(self, roles: NodeRoles, part: Part, forked: Sequence[ForkedRank]) -> None:
        self._roles = roles
        self._part = part
        self._forked = forked
        self._server = NodeServer(part.plan.config)
        self._leader: Leader
        self._grammars: GrammarCompiler
        self._adapters: AdapterTable
        self._loader: NodeAdapters
        self._lora: AdapterAdmin
        self._pool: BlockPool

    def _post(self, event: Any) -> None:
        """Pass an event to the core of the present role. Any thread."""
        self._server.post(event)

    async def run(self) -> None:
        """Run until cancelled. Raises: ConfigError, EngineError, RestartRequested."""
        await self._server.bind()
        plan, config = self._part.plan, self._part.plan.config
        configured = configured_sources(plan)
        before = await read_loaded_adapters(config.redis_url, config.cluster, self._server.node_id, config.tls_dir)
        loaded, missing = await loaded_sources(before, configured, plan)
        self._grammars = make_grammars(plan, self._post)
        self._grammars.preload()
        self._leader = leader = Leader(self._part.role, plan, self._forked)
        await leader.load()
        try:
            worker = leader.worker
            self._pool = make_pool(plan, leader.num_blocks)
            self._loader = NodeAdapters(
                worker.adapters, plan.model_config, plan.world_size, leader.broadcast, self._post
            )
            self._adapters = AdapterTable(self._loader, plan.config.max_loras, [*configured, *loaded])
            self._lora = AdapterAdmin(self._adapters, configured, missing, plan, self._server)
            try:
                await self._serve_in_turn()
            finally:
                self._loader.close()
        finally:
            self._grammars.close()
            leader.close()

    async def _serve_in_turn(self) -> None:
        """Serve in one role after the other, with the same weights, KV and adapters."""
        done: FlipAdmin | None = None
        while True:
            done = await self._serve(done)
            assert done.next is not None
            self._part = done.next
            # It keeps its address, for those that watch this process.
            self._server = self._lora.node = NodeServer(self._part.plan.config, self._server)
            await self._server.bind()

    async def _serve(self, before: FlipAdmin | None) -> FlipAdmin:
        """Serve in the present role. `before`: what ended the one before. Returns what has changed the role."""
        server, leader, role = self._server, self._leader, self._part.role
        plan = fit_memory(self._part.plan, leader.num_blocks)
        make_end = partial(role.transfer_end, leader.worker, 0, server.me.incarnation)
        transfers = NodeTransfers(plan.world_size, leader.broadcast, self._post, make_end)
        lock = FlipLock(plan.config.redis_url, plan.config.cluster, plan.config.tls_dir)
        try:
            address = plan.addresses.advertised(transfers.end.address)
            await leader.start_ranks(role.name, server.me.incarnation, address)
            leader.watch(self._post, transfers.on_event, server.on_crash, self._loader.on_report)
            me = replace(server.me, data_addresses=leader.data_addresses)
            record = make_record(role.name, me, plan, leader.num_blocks, leader.worker.kernels, self._adapters.sources)
            core = role.core(plan, self._core_parts(plan, me, transfers), transfers)
            experts = AdminRoute("GET", "/experts", lambda call: asyncio.wrap_future(server.ask(leader.experts)))
            flip = FlipAdmin(server, lock, self._roles, self._part, record, core.fail_all)
            status = NodeAdmin(
                server, record, lambda: {"ranks": leader.ranks(), "relays": transfers.describe(), **flip.describe()}
            )
            await server.run(
                core,
                record,
                self._pool.new_journal(),
                on_ready=lambda: self._on_ready(me, lock, before),
                routes=[*status.routes(), *self._lora.routes(), experts, *flip.routes()],
                loaded=self._lora.loaded,
                own_role=self._roles.own,
                use_idle_time=leader.worker.page_supply.use_idle_time,
            )
            if self._pool.num_used:
                raise EngineError(
                    f"{counted(self._pool.num_used, 'KV block')} are in use after all requests have ended"
                )
            return flip
        finally:
            await lock.close()
            transfers.close()

    def _core_parts(self, plan: NodePlan, me: PeerRef, transfers: NodeTransfers) -> CoreParts:
        leader, handed_on = self._leader, list[HandedOn]()

        def run_head(step: StepInput) -> StepOutput:
            return leader.run_head(with_handed_on(step, handed_on))

        return CoreParts(
            me=me,
            layout=plan.layout,
            vocab_size=plan.model.vocab_size,
            scheduler=make_scheduler(plan, self._pool, leader.worker.draft, run_head),
            executor=leader.executor(transfers.end.blocks_final, self._post),
            grammars=self._grammars,
            send_buffer=self._server.send_buffer,
            clock=monotonic,
            max_accepted=_MAX_ACCEPTED,
            transfer_timeout_s=plan.config.transfer_timeout_s,
            adapters=self._adapters,
            handed_on=handed_on,
        )

    def _on_ready(self, me: PeerRef, lock: FlipLock, before: FlipAdmin | None) -> None:
        self._lora.load_first()
        name = self._part.role.name
        log.info("%s node %s ready at %s", name, me.node_id, me.control_address)
        self._roles.served = True
        if before is not None:
            log.info("it was drained %.3f s ago, as a %s node", monotonic() - before.idle_s, OTHER[name])
            if not before.keeps_lock:
                self._releasing = asyncio.create_task(lock.release(before.transaction))
