"""The entry point of routing: which prefill node and which decode node serve an attempt, and why. Pure.

Runs in the router process, on its event loop, once per attempt.
"""

from __future__ import annotations

import numpy as np

from common.base.counted import counted
from common.base.errors import ConfigError, Unavailable
from common.control.messages import Adapter
from router.policy import at_random, kv_aware, least_load, power_of_two, round_robin, session
from router.policy.base import Memory, Policy, Query, Scores
from router.policy.decision import SHOWN_CANDIDATES, Decision, LegDecision, Picked
from router.policy.fleet import FEW, Fleet, stable_hash
from router.policy.picking import pick, shown

_SHORT_TOKENS = 32
"""Prompts up to this length need no relay, unless an estimate says otherwise."""

POLICIES: dict[str, Policy] = {
    module.POLICY.name: module.POLICY
    for module in (kv_aware, least_load, round_robin, at_random, power_of_two, session)
}


def check_policy(name: str) -> str:
    """Return `name` if there is such a policy.

    Raises: ConfigError that lists the known ones.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown routing policy {name!r}; known: {', '.join(POLICIES)}")
    return name


def choose(policy: Policy, fleet: Fleet, query: Query, memory: Memory) -> tuple[int, int, Scores]:
    """The row of the best node of `fleet` (not empty), the prompt tokens that it has cached, and all scores."""
    scores = policy.score(fleet, query, memory)
    if not isinstance(scores, list) and len(scores) <= FEW:
        scores = scores.tolist()
    row = pick(policy, scores, fleet, memory)
    return row, min(query.hits.get(fleet.incarnations[row], 0) * query.block_size, query.num_tokens), scores


def without(fleet: Fleet, avoid: frozenset[str]) -> Fleet:
    """`fleet` without the nodes to avoid."""
    rows = [row for incarnation in avoid if (row := fleet.row(incarnation)) is not None] if avoid else []
    if not rows:
        return fleet
    mask = np.ones(len(fleet), np.bool_)
    mask[rows] = False
    return fleet.select(mask)


def with_kind(fleet: Fleet, kind: str) -> Fleet:
    """The nodes of `fleet` whose KV is of this kind."""
    if fleet.one_kind and fleet.kv_kinds[0] == kind:
        return fleet
    return fleet.select(fleet.kind_hash == stable_hash(kind))


def with_adapter(fleet: Fleet, adapter: Adapter) -> Fleet:
    """The nodes of `fleet` that serve this adapter, with these weights."""
    if adapter in fleet.common_adapters:
        return fleet
    return fleet.select(np.array([adapter in each for each in fleet.adapters], np.bool_))


def with_context(fleet: Fleet, num_tokens: int) -> Fleet:
    """The nodes of `fleet` where a sequence may have `num_tokens` tokens."""
    if fleet.shortest_context >= num_tokens:
        return fleet
    return fleet.select(np.array([context >= num_tokens for context in fleet.contexts], np.bool_))


def place(
    query: Query,
    prefill: Fleet,
    decode: Fleet,
    *,
    policy: str,
    local_prefill_tokens: int | None,
    memory: Memory,
    shown_count: int | None = SHOWN_CANDIDATES,
) -> Decision:
    """Pick nodes for one attempt.

    `local_prefill_tokens`: the decode node computes up to this many uncached tokens itself; None: the policy decides.
    `shown_count`: candidates that the decision names per leg; None: all.

    Invariants: a relay is only planned between nodes with compatible KV, and from a node whose context is longer than the
    prompt; a decode node whose context is too short for the whole answer is the last resort.
    Raises: Unavailable when there is no decode node.
    """
    if not decode.incarnations:
        raise Unavailable("no decode node is available now; try again")
    memory.turn += 1
    how = POLICIES[policy]
    targets = _targets(query, decode)
    row, hit_tokens, scores = choose(how, targets, query, memory)
    at, picked = targets.nodes[row], Picked(targets.node_ids[row], targets.incarnations[row], hit_tokens)
    target = LegDecision(picked, shown(targets, scores, shown_count))
    uncached = max(query.num_tokens - hit_tokens, 1)
    costs = targets.costs if targets.costs.prefills else prefill.costs  # decode nodes have not measured a prefill yet
    local_s, local_delay_s = kv_aware.local_s(at, uncached, query, costs)
    step_s = kv_aware.step_s(at, targets.costs)
    by_estimate = how.estimates and local_prefill_tokens is None
    if query.holder == picked.incarnation:
        return Decision(policy, "local", "it has the prompt's KV already", target, None, local_s, step_s)
    if by_estimate or uncached > (_SHORT_TOKENS if local_prefill_tokens is None else local_prefill_tokens):
        sources, reason = _sources(query, prefill, picked, targets.kv_kinds[row])
    else:
        sources, reason = prefill, f"{counted(uncached, 'token is/tokens are')} too few to relay"
    if reason:
        return Decision(policy, "local", reason, target, None, local_s, step_s)
    preferred = without(sources, query.avoid)
    pool = preferred or sources
    source_row, source_hit, source_scores = choose(how, pool, query, memory)
    source, computed = pool.nodes[source_row], max(query.num_tokens - source_hit, 1)
    work_s = source.slowness * kv_aware.compute_s(pool.costs, computed, query)
    relay_s = kv_aware.queue_s(source, pool.costs) + work_s
    relay_s += kv_aware.transfer_s(at, query.num_tokens - hit_tokens, targets.costs)
    reason = f"{counted(uncached, 'token is/tokens are')} not cached"
    if by_estimate:
        here_s, there_s = local_s + local_delay_s, relay_s + kv_aware.delay_s(costs, computed, query)
        if here_s < there_s:
            reason = f"relaying {counted(uncached, 'token')} would cost {_more(there_s, here_s)}"
            return Decision(policy, "local", reason, target, None, local_s, step_s)
        reason = f"computing {counted(uncached, 'token')} on the decode node would cost {_more(here_s, there_s)}"
    if not preferred.incarnations:
        reason += "; the prefill nodes failed this request before, but there is no other"
    picked = Picked(pool.node_ids[source_row], pool.incarnations[source_row], source_hit, work_s)
    chosen = LegDecision(picked, shown(pool, source_scores, shown_count))
    return Decision(policy, "relayed", reason, target, chosen, relay_s, step_s)


def _more(high_s: float, low_s: float) -> str:
    """What a choice costs more than the other, the delay of other requests included."""
    high_ms, low_ms = 1000 * high_s, 1000 * low_s
    return f"{high_ms - low_ms:.3g} ms more ({high_ms:.3g} against {low_ms:.3g}, the delay of others included)"


def _targets(query: Query, decode: Fleet) -> Fleet:
    """The decode nodes to choose from. A restriction that would leave no node is ignored."""
    able = with_context(decode, query.num_tokens + query.max_new_tokens) or decode
    if query.kv_kind:
        able = with_kind(able, query.kv_kind) or able
    able = without(able, query.avoid) or able
    if query.holder and able.row(query.holder) is not None:
        able = able.select(np.array([each == query.holder for each in able.incarnations], np.bool_))
    return able


def _sources(query: Query, prefill: Fleet, target: Picked, kv_kind: str) -> tuple[Fleet, str]:
    """The prefill nodes that can compute the prompt for this decode node, including those to avoid; and why none is used
    (empty if one can be).
    """
    if not prefill.incarnations:
        return prefill, "no prefill node is available"
    if target.incarnation in query.avoid:
        return prefill, f"{target.node_id} failed lately and there is no other: no relay to it"
    fitting = with_kind(prefill, kv_kind)
    if not fitting.incarnations:
        return fitting, f"no prefill node has the KV of {target.node_id}"
    # Unless the answer ends with its first token, the prefill node's context must have room for one more token.
    whole = query.num_tokens + query.max_new_tokens
    fitting = with_context(fitting, max(query.num_tokens + 1, min(query.num_tokens + 2, whole)))
    if not fitting.incarnations:
        return fitting, f"no prefill node takes {query.num_tokens} tokens"
    if query.last and not without(fitting, query.avoid).incarnations:
        return fitting, "the prefill nodes failed this request before"
    return fitting, ""
