"""Admin routes of a router: its nodes, its requests, and dry runs of routing. Runs on the router's event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from common.base.clock import monotonic
from common.base.errors import BadRequest, NotFound
from common.base.hashing import BLOCK_SIZE
from common.base.transitions import unlisted_counts
from common.cluster.membership import Directory
from common.control.admin_server import DRAIN_S, AdminRoute, Call, seconds
from router.index.kv_event_subscriber import KvEventSubscriber
from router.models.served_model import ServedModel
from router.nodes.node import Node
from router.planner.loop import PlannerLoop
from router.policy import Fleet, Query
from router.requests.placement import HashChain
from router.restart import Restart
from router.router import Router

_MAX_LISTED = 1000


class RouterAdmin:
    """The admin routes of one router. They change nothing, except `POST /restart` and `/scale`."""

    def __init__(
        self,
        router: Router,
        directory: Directory | None,
        restart: Restart | None = None,
        planner: PlannerLoop | None = None,
    ) -> None:
        """`restart`: how the process ends when an operator asks; None if it cannot. `planner`: None if it is off."""
        self._router = router
        self._directory = directory
        self._restart = restart
        self._planner = planner
        self._started_s = monotonic()

    def routes(self) -> list[AdminRoute]:
        """All routes, for the admin port."""
        return [
            AdminRoute("GET", "/status", lambda call: self.status()),
            AdminRoute("GET", "/nodes", self._nodes),
            AdminRoute("GET", "/requests", self._requests),
            AdminRoute("GET", "/requests/{request_id:path}", lambda call: self.story(call.path["request_id"])),
            AdminRoute("POST", "/route", self.explain_route),
            AdminRoute("POST", "/blocks", self.find_blocks),
            AdminRoute("POST", "/restart", self._begin_restart),
            AdminRoute("POST", "/scale", self._scale),
            AdminRoute("GET", "/plan", self._plan),
        ]

    def status(self) -> Mapping[str, Any]:
        """The answer of `kvrelay admin router`."""
        dispatcher, index = self._router.dispatcher, self._router.index
        subscriber = self._router.subscriber
        return {
            "role": "router",
            "router_id": dispatcher.nodes.router_id,
            "pid": os.getpid(),
            "up_s": round(monotonic() - self._started_s, 1),
            "cluster": self._router.cluster,
            "models": [self._model(model) for model in self._router.catalog.models],
            "policy": dispatcher.config.policy,
            "restarting": dispatcher.draining,
            "requests_running": dispatcher.running,
            "requests_waiting": dispatcher.waiting,
            "requests_held_back": dispatcher.queued,
            "objectives": dispatcher.objectives.shown(),
            "planner": {"mode": "off"} if self._planner is None else self._planner.shown(),
            "breakers_opened": dispatcher.breakers.times_opened,
            "unlisted_transitions": dict(unlisted_counts),
            "redis": self._router.degraded(self._directory) or "ok",
            "redis_evicts": "" if self._directory is None else self._directory.evicts,
            "refused": self._router.catalog.refusals,
            "ignored_nodes": self._router.catalog.ignored_nodes,
            "refused_nodes": {} if self._directory is None else self._directory.refused,
            "vanished": {} if self._directory is None else self._directory.vanished,
            "index": {
                "blocks": len(index),
                "max_blocks": index.max_blocks,
                "evicted": index.evicted,
                "nodes": len(index.incarnations),
                **({} if subscriber is None else _feed(subscriber, self._name)),
            },
            "costs": {name: self._costs(name) for name in {model.base for model in self._router.catalog.models}},
        }

    def _begin_restart(self, call: Call) -> Mapping[str, Any]:
        """Refuse new requests after `grace_s`; end the process when the last has ended, or `timeout_s` later."""
        if self._restart is None:
            raise BadRequest("this router cannot restart")
        self._restart.begin(seconds(call, "grace_s", 0.0), seconds(call, "timeout_s", DRAIN_S))
        return self.status()

    async def _scale(self, call: Call) -> Mapping[str, Any]:
        """Body: numbers of nodes by role, those that change. Answers with all."""
        if self._directory is None:
            raise NotFound("this router reads no nodes from Redis")
        return await self._directory.scale(call.body)

    def _plan(self, call: Call) -> Mapping[str, Any]:
        """How many nodes the planner wants, and why."""
        if self._planner is None:
            raise NotFound("nothing is planned: this router runs with --planner off")
        return self._planner.shown()

    def _model(self, model: ServedModel) -> Mapping[str, Any]:
        """What `/status` says about a model."""
        state = self._router.dispatcher.state(model.base)
        fleets = state.fleets.by_role
        return {
            "name": model.name,
            "registered_as": model.base,
            "task": model.task,
            "max_model_len": model.max_model_len,
            "prefill_nodes": len(fleets["prefill"]),
            "decode_nodes": len(fleets["decode"]),
            "requests_waiting": len(state.unanswered),
            "requests_held_back": len(state.admission_queue),
        }

    def _costs(self, model: str) -> Mapping[str, Any]:
        placer = self._router.dispatcher.state(model).placer
        return {role: dataclasses.asdict(learned.costs) for role, learned in placer.models.items()}

    def _name(self, incarnation: str) -> str:
        node = self._router.dispatcher.nodes.get(incarnation)
        return incarnation if node is None else node.node_id

    def _nodes(self, call: Call) -> Mapping[str, Any]:
        table = self._router.dispatcher.nodes
        described = [
            {
                **self.describe(node),
                "routing": _routing(table.fleets(node.record.model.name).by_role[node.record.role], node.incarnation),
            }
            for node in sorted(table.known(), key=lambda node: (node.record.role, node.node_id))
        ]
        return {"time": time.time(), "lease_s": self._router.dispatcher.config.lease_s, "nodes": described}

    def describe(self, node: Node) -> dict[str, Any]:
        """Everything that this router knows about a node, as plain data."""
        record = node.record
        return {
            "node_id": node.node_id,
            "incarnation": node.incarnation,
            "role": record.role,
            "state": node_state(node),
            "usable": node.usable,
            "draining": node.load.draining,
            "model": record.model.name,
            "task": record.model.task,
            "adapters": [adapter.name for adapter in record.adapters],
            "fingerprint": record.layout.fingerprint,
            "kv": f"{record.layout.spec.dtype}, {record.layout.spec.bytes_per_block} bytes per block",
            "tokenizer": record.model.tokenizer,
            "max_model_len": record.model.max_model_len,
            "layout": record.layout.described_ranks(),
            "control_address": record.peer.control_address,
            "data_addresses": record.peer.data_addresses,
            "admin_address": record.admin_address,
            "started_at": record.started_at,
            "answered_s_ago": None if node.last_pong_s is None else round(monotonic() - node.last_pong_s, 3),
            "unreported": len(node.unreported),
            "load": dataclasses.asdict(node.load),
            "breaker": dataclasses.asdict(self._router.dispatcher.breakers.view(node.incarnation)),
            "index_blocks": {"device": self._router.index.num_blocks(node.incarnation)},
        }

    def _requests(self, call: Call) -> Mapping[str, Any]:
        limit = checked_limit(call.query.get("limit", "20"), _MAX_LISTED)
        return {"requests": self._router.dispatcher.stories.recent(limit)}

    def story(self, request_id: str) -> Mapping[str, Any]:
        """What happened to a request. Raises: NotFound."""
        story = self._router.dispatcher.stories.get(request_id)
        if story is None:
            raise NotFound("this router does not know the request: another router served it, or it is too long ago")
        return story

    async def explain_route(self, call: Call) -> Mapping[str, Any]:
        """Body: `prompt` (text or token ids); optional `model`, `chat` (the prompt is a user's message), `max_tokens`,
        `cache_salt`, `session`."""
        prompt, max_tokens = call.body.get("prompt"), call.body.get("max_tokens", 16)
        salt, session = call.body.get("cache_salt", ""), call.body.get("session", "")
        if type(max_tokens) is not int or not 0 <= max_tokens < 2**31:
            raise BadRequest("max_tokens must be a number", param="max_tokens")
        if not isinstance(salt, str) or not isinstance(session, str):
            raise BadRequest("cache_salt and session must be strings")
        name = call.body.get("model")
        if name is not None and not isinstance(name, str):
            raise BadRequest("model must be a string", param="model")
        model = self._router.catalog.model_for(name, "generate")
        if isinstance(prompt, str) and prompt:
            # Tokenizing may take a while, so it runs on a thread.
            chat = call.body.get("chat") is True
            prompt_ids = await asyncio.to_thread(_encode, model, prompt, chat=chat)
        else:
            prompt_ids = _checked_ids(prompt, model.vocab_size)
        if len(prompt_ids) > model.max_model_len:
            raise BadRequest(f"the prompt has {len(prompt_ids)} tokens, the model takes {model.max_model_len}")
        dispatcher = self._router.dispatcher
        avoid = dispatcher.breakers.not_admitted()
        adapter = model.adapter
        chain = HashChain(salt, "" if adapter is None else adapter.lora_id)
        query = Query(len(prompt_ids), avoid, max_new_tokens=max_tokens, session=session, adapter=adapter)
        state = dispatcher.state(model.base)
        return state.placer.explain(
            query,
            partial(chain.hashes, token_ids=prompt_ids),
            dispatcher.objectives,
            len(state.admission_queue),
        )

    async def find_blocks(self, call: Call) -> Mapping[str, Any]:
        """How many leading blocks of a prompt each node holds according to the prefix index. Body: that of `explain_route`."""
        explained = await self.explain_route(call)
        nodes = [
            {"node": row["node"], "role": role, "blocks": row["hit_tokens"] // BLOCK_SIZE}
            for role in ("prefill", "decode")
            for row in explained[role]
        ]
        return {**{name: explained[name] for name in ("prompt_tokens", "prompt_blocks")}, "nodes": nodes}


def checked_limit(text: str, most: int) -> int:
    """The `limit` of a query. Raises: BadRequest if it is no number from 1 to `most`."""
    if not text.isdecimal() or len(text) > len(str(most)) or not 1 <= int(text) <= most:
        raise BadRequest(f"limit must be between 1 and {most}", param="limit")
    return int(text)


def _encode(model: ServedModel, text: str, *, chat: bool) -> list[int]:
    """Token ids of `text`. Raises: BadRequest if the text is too long."""
    if model.tokenizer.min_tokens(text) > model.max_model_len:
        raise BadRequest(f"the prompt has more than the {model.max_model_len} tokens that the model takes")
    if not chat:
        return model.tokenizer.encode(text, add_special_tokens=True)
    messages = [{"role": "user", "content": text}]
    rendered = model.tokenizer.render_chat(messages)
    return model.tokenizer.encode_chat(rendered)


def _checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    """`prompt` as token ids. Raises: BadRequest if it is something else."""
    ids = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    if not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise BadRequest(f"prompt must be a string or a list of token ids below {vocab_size}", param="prompt")
    return ids


def _routing(fleet: Fleet, incarnation: str) -> dict[str, float] | None:
    """The figures of a node that policies see, including learned factors; None while it gets no work."""
    if incarnation not in fleet:
        return None
    return {name: round(value, 6) for name, value in fleet.values(incarnation).items()}


def _feed(subscriber: KvEventSubscriber, name: Callable[[str], str]) -> dict[str, Any]:
    """Counters of the KV event subscriber."""
    return {
        "events": subscriber.blocks,
        "gaps": subscriber.gaps,
        "snapshots": subscriber.snapshots,
        "lag_s": round(subscriber.lag_s, 3),
        "behind": [name(incarnation) for incarnation in subscriber.behind],
        "silent": [name(incarnation) for incarnation in subscriber.silent],
    }


def node_state(node: Node) -> str:
    """The state `usable`, or why the node is not."""
    if node.usable:
        return "usable"
    if node.link is None or node.last_pong_s is None:
        return "not answering"
    if node.stuck:
        return "stuck: its engine makes no progress"
    if node.load.draining:
        return "draining"
    return "not listed in Redis any more"
