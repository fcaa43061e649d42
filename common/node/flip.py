"""The admin route that changes a node's role: `POST /flip`. Runs on the node's asyncio loop.

The node drains. Then, if both roles need the same ranks with the same weights, it goes on in the other role with what is in
memory: weights, KV blocks, prefix cache, adapters (`common.node.startup`). If not, it restarts, in that role.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from common.base.clock import monotonic
from common.base.errors import BadRequest, ConfigError, KvRelayError, Unavailable
from common.base.sentences import counted
from common.cluster.desired_state import OTHER
from common.cluster.redis_client import tolerated
from common.cluster.runtime_changes import HELD_S, FlipLock
from common.control.admin_server import DRAIN_S, AdminRoute, Call, seconds
from common.control.messages import NodeRecord
from common.kernels.native.find import find_native
from common.node.admin import attempts_of, is_idle
from common.node.plan import NodePlan
from common.node.roles import NodeRole, NodeRoles, load_role
from common.node.server import NodeServer

log = logging.getLogger(__name__)

_POLL_S = 0.05
_END_S = 5.0
"""Time for attempts to end that were still there at the deadline of the drain."""


@dataclass(frozen=True)
class Part:
    """A role of this node, with its plan."""

    role: NodeRole[Any]
    plan: NodePlan


class FlipAdmin:
    """Changes the role of one node, once: afterwards the node has a new `FlipAdmin`, or a new process."""

    def __init__(
        self,
        node: NodeServer,
        lock: FlipLock,
        roles: NodeRoles,
        now: Part,
        record: NodeRecord,
        fail_all: Callable[[KvRelayError], None],
    ) -> None:
        """`fail_all` ends all attempts, on the engine's thread, so that their routers continue them elsewhere."""
        self._node = node
        self._fail_all = fail_all
        self._lock = lock
        self._roles = roles
        self._now = now
        self._record = record
        self._changing = False
        self._task: asyncio.Task[None] | None = None
        self.next: Part | None = None
        """What the node goes on as when it has left; None: it has not been asked, or restarts."""
        self.transaction = ""
        self.keeps_lock = False
        self.idle_s = 0.0
        """When the node was drained."""

    def routes(self) -> list[AdminRoute]:
        """The route, for the admin port."""
        return [AdminRoute("POST", "/flip", self._flip)]

    def describe(self) -> dict[str, Any]:
        """For the node's status: the role that it is about to have; None if it keeps its own."""
        return {"flips_to": OTHER[self._record.role] if self._changing else None}

    async def _flip(self, call: Call) -> dict[str, Any]:
        """Drain, then change the role, after `timeout_s` even with attempts, which their routers continue elsewhere.

        `transaction`: the same for all flips that belong together; all but the last have `more`. `wanted`: the wanted numbers of
        nodes say so already; else they change with the role. Answers before it drains: whether that will be in place, and why not.
        """
        timeout_s = seconds(call, "timeout_s", DRAIN_S)
        transaction = call.body.get("transaction", "")
        if not isinstance(transaction, str) or len(transaction) > 64:
            raise BadRequest("transaction must be a text of up to 64 characters", param="transaction")
        if self._changing:
            raise BadRequest(f"{self._record.peer.node_id} changes its role already")
        if self._now.plan.config.nnodes > 1:
            raise BadRequest(
                f"{self._record.peer.node_id} has ranks on several hosts, each of which starts with the role of its own command"
            )
        self._changing = True
        try:
            then = await asyncio.to_thread(self._other)
            why = why_restart(self._now, then)
            if why and self._now.plan.config.node_id is None:
                raise BadRequest(f"{why}, and without --node-id its next process would not know its role")
            self.transaction = transaction or secrets.token_hex(8)
            self.keeps_lock = call.body.get("more") is True
            await self._lock.take(self.transaction, self._record)
        except BaseException:
            self._changing = False
            raise
        self._node.drain.begin()
        moves = call.body.get("wanted") is not True
        self._task = asyncio.create_task(self._change(then, why, monotonic() + timeout_s, moves_wanted=moves))
        return {"node_id": self._record.peer.node_id, "role": then.role.name, "in_place": not why, "why": why}

    def _other(self) -> Part:
        """The other role of this node. Raises: BadRequest if it cannot have it."""
        name = OTHER[self._record.role]
        try:
            role = load_role(name)
            return Part(role, role.plan(self._roles.config(name)))
        except ConfigError as error:
            raise BadRequest(f"{self._record.peer.node_id} cannot be a {name} node: {error.message}") from error

    async def _change(self, then: Part, why: str, until_s: float, *, moves_wanted: bool) -> None:
        name = then.role.name
        log.info(
            "this %s node drains and becomes a %s node%s",
            self._record.role,
            name,
            f" by a restart: {why}" if why else "",
        )
        idle = await self._drained(until_s)
        if not self._node.drain.active:
            log.info("this node keeps its role: undrain was called")
            self._changing = False
            await self._lock.release(self.transaction)
            return
        if not idle:
            self._node.ask(partial(self._fail_all, Unavailable(f"this node becomes a {name} node")))
            idle = await self._drained(monotonic() + _END_S)
        self.idle_s = monotonic()
        if moves_wanted:
            await self._lock.move_wanted(self._record)
        if why or not idle:
            self._node.restart(name)
        else:
            self.next = then
            self._node.leave()

    async def _drained(self, until_s: float) -> bool:
        """Wait until nothing runs or the drain is called off, at most until `until_s`. Returns whether nothing runs."""
        renew_s = 0.0
        while self._node.drain.active and monotonic() <= until_s:
            if is_idle(self._node, await attempts_of(self._node)):
                return True
            if monotonic() > renew_s:
                renew_s = monotonic() + HELD_S / 3
                await self._renew()
            await asyncio.sleep(_POLL_S)
        return False

    async def _renew(self) -> None:
        with tolerated(log, "the change of this node's role goes on without Redis"):
            await self._lock.renew(self.transaction)


def why_restart(now: Part, then: Part) -> str:
    """Why a node cannot go on in the other role with what is in memory; empty if it can."""
    a, b = now.plan, then.plan
    if a.layout != b.layout:
        ranks = counted(a.world_size, "rank"), counted(b.world_size, "rank")
        return f"as a {then.role.name} node it has another layout ({ranks[1]}, now {ranks[0]})"
    if then.role.small_batches and not now.role.small_batches and (a.device == "cuda" or find_native() is None):
        return "a prefill node has not prepared what a decode node needs for small batches"
    if _at_start(now) != _at_start(then):
        return f"options that a {then.role.name} node reads at its start are different"
    return ""


_OF_MODEL = ("load_format", "seed", "packed_cache_gb", "enforce_eager", "max_loras", "max_lora_rank")
_OF_TRANSFERS = ("kv_transport", "may_use_collectives", "data_port", "transfer_timeout_s")
_AT_START = ("threads", "nice", *_OF_MODEL, *_OF_TRANSFERS)
"""Options that a process reads once. Those that decide other fields of a plan are compared as these fields."""
_AMONG_RANKS = ("tls_dir", "master_addr", "master_port", "rank_timeout_s", "start_timeout_s", "lease_s")
"""The same, of nodes with several ranks."""


def _at_start(part: Part) -> object:
    """All that cannot change in a process: what its weights and its memory were made from, its threads, its niceness."""
    plan = part.plan
    undefined = cast("Any", None)
    fixed = replace(plan, config=undefined, steps=undefined, speculation=None)
    are_given = plan.config.max_model_len is None, plan.config.tls_dir is None
    names = _AT_START + (_AMONG_RANKS if plan.world_size > 1 else ())
    # The ranks keep the tokens of a step for the next one only if steps overlap.
    return fixed, plan.steps.depth, are_given, [getattr(plan.config, name) for name in names]
