"""Metrics of the nodes, from their last pongs, at each scrape. Router process, event loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from common.base.transitions import unlisted_counts
from common.control.messages import Role
from common.control.node_reports import STEP_TOKENS, NodeLoad
from router.nodes.breaker import Breakers
from router.nodes.node import Node

_BREAKER_STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}
_NODE_GAUGES: dict[str, tuple[str, Callable[[NodeLoad], float]]] = {
    "vllm:num_requests_running": ("Sequences in the running batch.", lambda load: load.running),
    "vllm:num_requests_waiting": ("Requests waiting for their first step.", lambda load: load.waiting),
    "vllm:kv_cache_usage_perc": (
        "Used share of the KV blocks, 0 to 1.",
        lambda load: load.kv_blocks_used / max(1, load.kv_blocks_total),
    ),
    "kvrelay_node_queued_tokens": ("Prompt tokens accepted but not computed yet.", lambda load: load.queued_tokens),
    "kvrelay_node_kv_blocks_cached": ("KV blocks kept only for prefix hits.", lambda load: load.kv_blocks_cached),
    "kvrelay_node_draining": (
        "1 while the node drains: it finishes its requests and gets no new ones.",
        lambda load: load.draining,
    ),
    "kvrelay_node_step_age_seconds": (
        "Seconds since the engine loop's last iteration or the end of the last asynchronous step.",
        lambda load: load.step_age_s,
    ),
    "kvrelay_node_speculation_saved_seconds": (
        "Estimated seconds of decode steps that drafts saved, less what wrong ones took.",
        lambda load: load.speculation_saved_s,
    ),
}
_NODE_COUNTERS: dict[str, tuple[str, Callable[[NodeLoad], float]]] = {
    "vllm:num_preemptions": ("Sequences preempted.", lambda load: load.preemptions),
    "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", lambda load: load.prefix_queries),
    "vllm:prefix_cache_hits": ("Tokens found in the prefix cache.", lambda load: load.prefix_hits),
    "kvrelay_node_prompt_tokens": ("Prompt tokens computed.", lambda load: load.prompt_tokens),
    "kvrelay_node_generated_tokens": ("Tokens generated.", lambda load: load.generated_tokens),
    "kvrelay_node_relayed_bytes": ("KV bytes relayed.", lambda load: load.relayed_bytes),
    "kvrelay_node_local_prefills": ("Prompts prefilled locally by a decode node.", lambda load: load.local_prefills),
    "kvrelay_node_transfers_failed": ("KV transfers that failed.", lambda load: load.transfers_failed),
}


class NodeCollector(Collector):
    """Turns the last pongs into metrics; a node that is gone leaves no stale series, only a zero of its model and role.

    A node's counters are exported only after its first load report: zeros before it would look like a counter reset if
    the node was forgotten and is listed again.
    """

    def __init__(
        self,
        nodes: Callable[[], Iterable[Node]],
        breakers: Breakers,
        roles: Callable[[], Iterable[tuple[str, Role]]],
    ) -> None:
        self._nodes = nodes
        self._roles = roles
        self._breakers = breakers

    def collect(self) -> Iterable[Metric]:
        nodes = list(self._nodes())
        labels = ["model_name", "node", "role"]
        usable = GaugeMetricFamily("kvrelay_node_usable", "1 if the node may get new work.", labels=labels)
        breaker = GaugeMetricFamily(
            "kvrelay_node_breaker", "The node's circuit breaker: 0 closed, 1 half-open, 2 open.", labels=labels
        )
        opened = CounterMetricFamily("kvrelay_breakers_opened", "Times that a node's circuit breaker opened.")
        opened.add_metric([], self._breakers.times_opened)
        unlisted = CounterMetricFamily(
            "kvrelay_unlisted_transitions", "Events that a state machine's table does not have: bugs of the router."
        )
        unlisted.add_metric([], sum(unlisted_counts.values()))
        families: list[Metric] = [usable, breaker, opened, unlisted]
        names = [[node.record.model.name, node.node_id, node.record.role] for node in nodes]
        for node, values in zip(nodes, names, strict=True):
            usable.add_metric(values, 1.0 if node.usable else 0.0)
            breaker.add_metric(values, _BREAKER_STATES[self._breakers.view(node.incarnation).state])
        families.append(self._usable_nodes(nodes))
        relayed = CounterMetricFamily(
            "kvrelay_relay_bytes", "KV bytes relayed, by transport.", labels=[*labels, "transport"]
        )
        for node, values in zip(nodes, names, strict=True):
            for transport, size_bytes in node.load.relayed_by.items():
                relayed.add_metric([*values, transport], size_bytes)
        families += [
            relayed,
            *_drafts(nodes, names, labels),
            _step_sizes(nodes, names, labels),
            *_of_vllm(nodes, names, labels),
        ]
        for table, family_type in ((_NODE_GAUGES, GaugeMetricFamily), (_NODE_COUNTERS, CounterMetricFamily)):
            for name, (text, read) in table.items():
                family = family_type(name, text, labels=labels)
                for node, values in zip(nodes, names, strict=True):
                    load = node.load
                    if table is _NODE_GAUGES or load.kv_blocks_total or (node.pools and load.prompt_tokens):
                        family.add_metric(values, read(node.load))
                families.append(family)
        return families

    def _usable_nodes(self, nodes: list[Node]) -> Metric:
        family = GaugeMetricFamily(
            "kvrelay_usable_nodes", "Nodes that may get new work.", labels=["model_name", "role"]
        )
        counts = dict.fromkeys(self._roles(), 0)
        for node in nodes:
            key = (node.record.model.name, node.record.role)
            counts[key] = counts.get(key, 0) + node.usable
        for labels, count in counts.items():
            family.add_metric(labels, count)
        return family


def _drafts(nodes: list[Node], names: list[list[str]], labels: list[str]) -> list[Metric]:
    """Counts of draft tokens, under vLLM's names and with the method as a label."""
    labels = [*labels, "method"]
    drafted = CounterMetricFamily(
        "vllm:spec_decode_num_draft_tokens", "Draft tokens that steps verified.", labels=labels
    )
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right.", labels=labels
    )
    for node, values in zip(nodes, names, strict=True):
        for family, counts in ((drafted, node.load.drafted), (accepted, node.load.drafts_accepted)):
            for method, count in counts.items():
                family.add_metric([*values, method], count)
    return [drafted, accepted]


def _of_vllm(nodes: list[Node], names: list[list[str]], labels: list[str]) -> list[Metric]:
    """Why requests wait, and how KV is kept."""
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Requests waiting for room in the batch (capacity), or for KV, a grammar or an adapter (deferred).",
        labels=[*labels, "reason"],
    )
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "How a node keeps KV, as labels.",
        labels=[*labels, "block_size", "cache_dtype", "num_gpu_blocks"],
    )
    for node, values in zip(nodes, names, strict=True):
        load, layout = node.load, node.record.layout
        waiting.add_metric([*values, "capacity"], load.waiting - load.deferred)
        waiting.add_metric([*values, "deferred"], load.deferred)
        dtypes = "+".join(sorted({group.dtype for group in layout.spec.groups}))
        cache.add_metric([*values, str(layout.spec.block_size), dtypes, str(node.record.kv_blocks_total)], 1)
    return [waiting, cache]


def _step_sizes(nodes: list[Node], names: list[list[str]], labels: list[str]) -> Metric:
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of an engine's step.", labels=labels)
    bounds = [floatToGoString(bound) for bound in (*STEP_TOKENS, math.inf)]
    for node, values in zip(nodes, names, strict=True):
        counts = node.load.steps_by_tokens
        if len(counts) == len(bounds):
            family.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), node.load.step_tokens)
    return family
