"""Filters: which nodes are candidates for a leg of an attempt. Pure; router process, event loop.

A filter that excludes no node returns the fleet itself.
"""

from __future__ import annotations

from common.control.messages import Adapter
from router.policy.base import Query
from router.policy.decision import LegDecision
from router.policy.fleet import Fleet


def without(fleet: Fleet, avoid: frozenset[str]) -> Fleet:
    """`fleet` without the nodes to avoid."""
    if not avoid or not any(each in fleet for each in avoid):
        return fleet
    return fleet.select(row for row, each in enumerate(fleet.incarnations) if each not in avoid)


def with_kind(fleet: Fleet, kind: str) -> Fleet:
    """The nodes of `fleet` whose KV is of this kind."""
    if fleet.one_kind and fleet.kv_kinds[0] == kind:
        return fleet
    return fleet.select(row for row, each in enumerate(fleet.kv_kinds) if each == kind)


def with_adapter(fleet: Fleet, adapter: Adapter) -> Fleet:
    """The nodes of `fleet` that serve this adapter, with these weights."""
    if adapter in fleet.common_adapters:
        return fleet
    return fleet.select(row for row, each in enumerate(fleet.adapters) if adapter in each)


def with_context(fleet: Fleet, num_tokens: int) -> Fleet:
    """The nodes of `fleet` where a sequence may have `num_tokens` tokens."""
    if fleet.shortest_context >= num_tokens:
        return fleet
    return fleet.select(row for row, context in enumerate(fleet.contexts) if context >= num_tokens)


def targets_of(query: Query, decode: Fleet) -> Fleet:
    """The decode nodes to choose from: none if no context has room for the tokens so far and another one.

    Any other restriction that would leave no node is ignored. An answer without a limit of its own counts with the usual
    length. One that outgrows its node moves to a larger one.
    """
    able = with_context(decode, query.num_tokens + 1)
    limit = query.max_new_tokens
    answer = min(limit, int(decode.costs.output_tokens)) if query.open_ended else limit
    able = with_context(able, query.num_tokens + answer) or able
    if query.kv_kind:
        able = with_kind(able, query.kv_kind) or able
    able = without(able, query.avoid) or able
    holder = able.row(query.holder) if query.holder else None
    return able if holder is None else able.select([holder])


def sources_of(query: Query, prefill: Fleet, target: LegDecision, kv_kind: str) -> tuple[Fleet, str]:
    """The prefill nodes that can compute the prompt for this decode node, and why none is used; "" if one can be.

    Nodes to avoid are among them.
    """
    if not prefill.incarnations:
        return prefill, "no prefill node is available"
    if target.incarnation in query.avoid:
        return prefill, f"{target.node_id} failed lately and there is no other: no relay to it"
    fitting = with_kind(prefill, kv_kind)
    if not fitting.incarnations:
        return fitting, f"no prefill node's KV is compatible with {target.node_id}"
    # Unless the answer ends with its first token, the prefill node's context must have room for one more token.
    whole = query.num_tokens + query.max_new_tokens
    fitting = with_context(fitting, max(query.num_tokens + 1, min(query.num_tokens + 2, whole)))
    if not fitting.incarnations:
        return fitting, f"no prefill node takes {query.num_tokens} tokens"
    if query.last and not without(fitting, query.avoid).incarnations:
        return fitting, "the prefill nodes failed this request before"
    return fitting, ""
