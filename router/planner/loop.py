"""Plans the cluster's shape. Runs on every router's event loop; the one that holds the lease in Redis plans.

What the planner remembers is in Redis too, with times of Redis's clock: another router that takes over knows what was changed
and when. All routers measure, so that the next one does not begin with nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from common.base.clock import monotonic, until_next
from common.cluster.desired_state import TOTAL, parsed_counts
from common.cluster.redis_client import UNREACHABLE, connect, forget_connections, honour_cancellation, short
from common.cluster.redis_keys import Keys
from common.cluster.redis_scripts import HEAL
from common.config.service_configs import RouterConfig
from router.nodes.node import Node
from router.planner.demand import DemandMeter, Sample, decode_slots
from router.planner.plan import Observed, PlanMemory, ShapeDecision, plan
from router.planner.sizing import NodeCounts, RoleCosts
from router.requests.admission import Objectives
from router.requests.dispatch import Dispatcher

log = logging.getLogger(__name__)

TICK_S = 10.0
_LEASE_S = 35.0
"""A router that planned and answers no longer is replaced after this time."""
_TIMEOUT_S = 5.0
_KEEP_S = 86_400
"""How long the last plan outlives the routers."""

# KEYS: planner, desired. ARGV: router, lease in seconds, seconds until the key expires.
# Returns whether this router plans, Redis's time, the last plan, the wanted counts.
_LEAD = (
    HEAL
    + """
heal(KEYS[1], 'hash') heal(KEYS[2], 'string')
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local held = redis.call('HMGET', KEYS[1], 'router', 'until', 'plan')
local mine = not held[1] or held[1] == ARGV[1] or (tonumber(held[2]) or 0) < now
if mine then
  redis.call('HSET', KEYS[1], 'router', ARGV[1], 'until', string.format('%.3f', now + ARGV[2]))
  redis.call('PEXPIRE', KEYS[1], 1000 * ARGV[3])
end
return {mine and 1 or 0, string.format('%.3f', now), held[3], redis.call('GET', KEYS[2])}
"""
)

# KEYS: planner, desired. ARGV: router, plan, wanted counts as they were read, new ones; the last two empty: no change.
# Returns 0, and changes nothing, if another router plans now or the counts have changed meanwhile.
_STORE = """
if redis.call('HGET', KEYS[1], 'router') ~= ARGV[1] then return 0 end
if ARGV[4] ~= '' then
  if redis.call('GET', KEYS[2]) ~= ARGV[3] then return 0 end
  redis.call('SET', KEYS[2], ARGV[4])
end
redis.call('HSET', KEYS[1], 'plan', ARGV[2])
return 1
"""


@dataclass(frozen=True)
class StoredPlan:
    """The last plan as Redis has it."""

    counts: NodeCounts
    why: str
    at_s: float
    """Unix time of Redis's clock."""
    memory: PlanMemory


_STORED = TypeAdapter(StoredPlan)


class PlannerLoop:
    """Measures, and plans while this router holds the lease."""

    def __init__(self, config: RouterConfig, dispatcher: Dispatcher, publish: Callable[[str, int], None]) -> None:
        """`publish`: exports a role and the nodes of it that the cluster is to have, for `--planner publish`.

        Raises: ConfigError for a malformed Redis URL.
        """
        self._client = connect(config.redis_url)
        self._keys = Keys(config.cluster)
        self._mode = config.planner
        self._applies = config.planner in ("apply", "publish")
        self._publish = publish
        self._objectives = Objectives(config.slo_ttft, config.slo_tpot)
        self._max_nodes = config.planner_max_nodes
        self._dispatcher = dispatcher
        self._meter = DemandMeter()
        self.latest: StoredPlan | None = None
        """The last plan of the cluster, by whichever router."""
        self._leads = False
        self._trouble = ""

    def shown(self) -> Mapping[str, Any]:
        """`latest` and this router's part in it, for operators."""
        latest = self.latest
        return {
            "mode": self._mode,
            "this_router_plans": self._leads,
            "wants": None if latest is None else latest.counts._asdict(),
            "why": "nothing was planned yet" if latest is None else latest.why,
            "planned_at": None if latest is None else latest.at_s,
            "trouble": self._trouble,
        }

    async def run(self) -> None:
        """Plan every `TICK_S` until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        await self.tick()
                except (*UNREACHABLE, TimeoutError) as error:
                    honour_cancellation()
                    self._leads, self._trouble = False, f"Redis is away: {short(error)}"
                    log.warning("nothing is planned: %s", self._trouble)
                    await forget_connections(self._client)
                except Exception:
                    log.exception("a plan failed")
                await asyncio.sleep(until_next(TICK_S, monotonic()))
        finally:
            await self._client.aclose()

    async def tick(self) -> None:
        """Measure; if this router is the one that plans, decide and store. Raises: UNREACHABLE."""
        nodes = [node for node in self._dispatcher.nodes.known() if not node.pools and node.last_pong_s is not None]
        self._meter.add(monotonic(), [Sample(node.record.role, node.incarnation, node.load) for node in nodes])
        router_id = self._dispatcher.nodes.router_id
        answer = await self._eval(_LEAD, router_id, _LEASE_S, _KEEP_S)
        self._leads, now_s, desired = bool(answer[0]), float(answer[1]), cast("bytes | None", answer[3])
        self.latest, self._trouble = _stored(answer[2]), ""
        counts = parsed_counts(desired)
        wanted = None if counts is None else NodeCounts(counts.get("prefill", 0), counts.get("decode", 1))
        if self._mode == "publish":
            await self._export(nodes, wanted)
        if not self._leads:
            return
        models = {node.record.model.name for node in nodes}
        if len(models) != 1:
            self._trouble = f"the nodes have {len(models)} models, and only one can be planned for"
            return
        observed = self._observe(now_s, models.pop(), nodes, wanted)
        memory = PlanMemory() if self.latest is None else self.latest.memory
        if wanted is None:  # nodes that come and go are no numbers that somebody set
            memory = replace(memory, wanted=None)
        trades_only = self._applies and counts is not None and TOTAL in counts
        max_nodes = None if trades_only else self._max_nodes
        decision = plan(observed, self._objectives, max_nodes, memory)
        await self._store(decision, observed, desired if self._applies and wanted is not None else None)

    async def _export(self, nodes: list[Node], wanted: NodeCounts | None) -> None:
        """Export the wanted counts. If nobody has set any, set those of the usable nodes once every role has one."""
        if wanted is not None:
            for role, count in wanted._asdict().items():
                self._publish(role, count)
            return
        usable = _usable_counts(nodes)
        if self._leads and all(usable):
            await self._client.set(self._keys.desired, json.dumps(usable._asdict()), nx=True)

    def _observe(self, now_s: float, model: str, nodes: list[Node], wanted: NodeCounts | None) -> Observed:
        usable = _usable_counts(nodes)
        decode = [node for node in nodes if node.record.role == "decode"]
        capacity = sum(node.record.max_num_seqs for node in decode) / max(1, len(decode))
        learned = self._dispatcher.state(model).placer.models
        costs = RoleCosts(
            learned["prefill"].costs, learned["decode"].costs, decode_slots([node.load for node in decode], capacity)
        )
        demand = self._meter.demand(costs.decode.output_tokens)
        return Observed(now_s, usable if wanted is None else wanted, usable, demand, costs)

    async def _store(self, decision: ShapeDecision, observed: Observed, desired: bytes | None) -> None:
        """desired: the counts in Redis, if they are to be replaced by those of the decision."""
        stored = StoredPlan(decision.counts, decision.why, observed.now_s, decision.memory)
        changes = decision.counts != observed.wanted
        after = (
            json.dumps({**json.loads(desired), **decision.counts._asdict()}) if changes and desired is not None else ""
        )
        before = desired if after and desired is not None else b""
        done = await self._eval(_STORE, self._dispatcher.nodes.router_id, _STORED.dump_json(stored), before, after)
        if not done:
            return  # somebody else planned or scaled at this moment: the next tick sees it
        if changes and (self.latest is None or self.latest.counts != decision.counts):
            log.info("%s: %s", "the shape changes" if after else "advice", decision.why)
        self.latest = stored

    async def _eval(self, script: str, *arguments: str | bytes | float) -> Any:
        keys = (self._keys.planner, self._keys.desired)
        return await self._client.eval(script, len(keys), *keys, *arguments)


def _usable_counts(nodes: list[Node]) -> NodeCounts:
    return NodeCounts(*(sum(n.usable and n.record.role == role for n in nodes) for role in ("prefill", "decode")))


def _stored(data: bytes | None) -> StoredPlan | None:
    """The last plan; None if there is none, or it is damaged."""
    try:
        return None if data is None else _STORED.validate_json(data)
    except ValidationError:
        return None
