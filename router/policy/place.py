"""The entry point of routing: which prefill node and which decode node serve an attempt, and why. Pure.

For each leg the filters (`filters.py`) name the candidates, the policy's scorer scores them, and the picker (`picker.py`) picks
one. Runs in the router process, on its event loop, once per attempt.
"""

from __future__ import annotations

from common.base.errors import ConfigError, Unavailable
from common.base.sentences import counted
from router.policy import kv_aware, scorers
from router.policy.base import Memory, Policy, Query, Routing, Scores
from router.policy.decision import SHOWN_CANDIDATES, Decision, LegDecision
from router.policy.filters import sources_of, targets_of, without
from router.policy.fleet import FEW, Fleet
from router.policy.picker import pick, shown

_SHORT_TOKENS = 32
"""Prompts up to this length need no relay, unless an estimate says otherwise."""

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (kv_aware.POLICY, *scorers.POLICIES)}


def find_policy(name: str) -> Policy:
    """The policy with this name.

    Raises: ConfigError that lists the known ones.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown routing policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def choose(policy: Policy, fleet: Fleet, query: Query, memory: Memory) -> tuple[int, int, Scores]:
    """The row of the best node of `fleet` (not empty), the prompt tokens that it has cached, and all scores."""
    scores = policy.score(fleet, query, memory)
    if not isinstance(scores, list) and len(scores) <= FEW:
        scores = scores.tolist()
    row = pick(policy, scores, fleet, memory)
    return row, min(query.hits.get(fleet.incarnations[row], 0) * query.block_size, query.num_tokens), scores


def place(
    query: Query,
    prefill: Fleet,
    decode: Fleet,
    routing: Routing,
    *,
    shown_count: int | None = SHOWN_CANDIDATES,
) -> Decision:
    """Pick nodes for one attempt. `shown_count`: candidates that the decision names per leg; None: all.

    Invariants: a relay is only planned between nodes with compatible KV, and from a node whose context is longer than the
    prompt; a decode node whose context is too short for the whole answer is the last resort.
    Raises: Unavailable when there is no decode node, or none whose context takes the tokens.
    """
    if not decode.incarnations:
        raise Unavailable("no decode node is available now; try again")
    policy, local_prefill_tokens, memory = routing.policy, routing.local_prefill_tokens, routing.memory
    memory.turn += 1
    targets = targets_of(query, decode)
    if not targets.incarnations:
        raise Unavailable(f"no decode node takes {query.num_tokens} tokens now; try again")
    row, hit_tokens, scores = choose(policy, targets, query, memory)
    at, named = targets.nodes[row], shown(targets, scores, shown_count)
    target = LegDecision(targets.node_ids[row], targets.incarnations[row], named, hit_tokens)
    uncached = max(query.num_tokens - hit_tokens, 1)
    costs = targets.costs if targets.costs.prefills else prefill.costs  # decode nodes have not measured a prefill yet
    local_s, local_delay_s = kv_aware.local_s(at, uncached, query, costs)
    step_s = kv_aware.steps_s(at, targets.costs, 1.0)
    by_estimate = policy.estimates and local_prefill_tokens is None
    if query.holder == target.incarnation:
        return Decision(policy.name, "local", "it has the prompt's KV already", target, None, local_s, step_s)
    if by_estimate or uncached > (_SHORT_TOKENS if local_prefill_tokens is None else local_prefill_tokens):
        sources, reason = sources_of(query, prefill, target, targets.kv_kinds[row])
    else:
        sources, reason = prefill, f"{counted(uncached, 'token is/tokens are')} too few to relay"
    if reason:
        return Decision(policy.name, "local", reason, target, None, local_s, step_s)
    preferred = without(sources, query.avoid)
    pool = preferred or sources
    source_row, source_hit, source_scores = choose(policy, pool, query, memory)
    source, computed = pool.nodes[source_row], max(query.num_tokens - source_hit, 1)
    work_s = source.slowness * kv_aware.compute_s(pool.costs, computed, query)
    relay_s = kv_aware.queue_s(source, pool.costs) + work_s
    relay_s += kv_aware.transfer_s(at, query.num_tokens - hit_tokens, targets.costs)
    reason = f"{counted(uncached, 'token is/tokens are')} not cached"
    if by_estimate:
        here_s, there_s = local_s + local_delay_s, relay_s + kv_aware.delay_s(costs, computed, query)
        if here_s < there_s:
            reason = f"relaying {counted(uncached, 'token')} would cost {_more(there_s, here_s)}"
            return Decision(policy.name, "local", reason, target, None, local_s, step_s)
        reason = f"computing {counted(uncached, 'token')} on the decode node would cost {_more(here_s, there_s)}"
    if not preferred.incarnations:
        reason += "; the prefill nodes failed this request before, but there is no other"
    named = shown(pool, source_scores, shown_count)
    chosen = LegDecision(pool.node_ids[source_row], pool.incarnations[source_row], named, source_hit, work_s)
    return Decision(policy.name, "relayed", reason, target, chosen, relay_s, step_s)


def _more(high_s: float, low_s: float) -> str:
    """What a choice costs more than the other, the delay of other requests included."""
    high_ms, low_ms = 1000 * high_s, 1000 * low_s
    return f"{high_ms - low_ms:.3g} ms more ({high_ms:.3g} against {low_ms:.3g}, the delay of others included)"
