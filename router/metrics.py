"""Prometheus metrics of the router, in a separate registry. Metrics that mean the same as in vLLM have vLLM's names.

Updated on the router's event loop; node metrics are read from the last pongs at each scrape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from common.base.transitions import unlisted_counts
from common.control.messages import AttemptStats, FinishReason, Role
from common.control.node_load import STEP_TOKENS, NodeLoad
from router.counters import Counter, Histogram
from router.nodes.breaker import Breakers
from router.nodes.node import Node

_LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)

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


_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_BREAKER_STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


@dataclass(slots=True)
class Finished:
    """Numbers of an answered request."""

    prompt_tokens: int
    duration_s: float
    tokens: int = 0
    max_tokens: int = 0
    decode_s: float = 0.0
    """From the first token to the last."""


class _NodeCollector(Collector):
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
        families += [relayed, *_drafts(nodes, names, labels), _step_sizes(nodes, names, labels)]
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


def _step_sizes(nodes: list[Node], names: list[list[str]], labels: list[str]) -> Metric:
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of an engine's step.", labels=labels)
    bounds = [floatToGoString(bound) for bound in (*STEP_TOKENS, math.inf)]
    for node, values in zip(nodes, names, strict=True):
        counts = node.load.steps_by_tokens
        if len(counts) == len(bounds):
            family.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), node.load.step_tokens)
    return family


class Metrics:
    """All metrics of one router process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        named = ["model_name"]

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
            return Histogram(name, text, named, buckets=buckets, registry=registry)

        success = ["model_name", "finished_reason"]
        self.success = Counter("vllm:request_success", "Requests answered.", success, registry=registry)
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens of answered requests.", named, registry=registry
        )
        self.generated = Counter("vllm:generation_tokens", "Tokens sent to clients.", named, registry=registry)
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.")
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _INTER_TOKEN_S)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Time from a request's arrival to its end.")
        self.queue = histogram("vllm:request_queue_time_seconds", "Time in a node's queue.")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "Prefill time.")
        self.decode = histogram("vllm:request_decode_time_seconds", "Time from the first token to the last.")
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Time per token after the first, by request.", _INTER_TOKEN_S
        )
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.request_generated = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.request_max = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens that a request may have generated.", _TOKENS
        )
        self.pooled = Counter(
            "kvrelay_pooled_inputs", "Inputs of pooling models that were answered.", named, registry=registry
        )
        self.failed = Counter("kvrelay_request_failed", "Requests that failed.", ["code"], registry=registry)
        self.cancelled = Counter(
            "kvrelay_request_cancelled", "Requests whose client disconnected.", registry=registry
        ).labels()
        self.relayed = Counter("kvrelay_relayed_bytes", "KV bytes relayed for requests.", registry=registry).labels()
        self._attempts = Counter("kvrelay_attempts", "Attempts placed, by prefill mode.", ["mode"], registry=registry)
        self.retries = Counter("kvrelay_retries", "Attempts beyond a request's first.", registry=registry).labels()
        self._http_errors = Counter("kvrelay_http_errors", "Error responses, by status.", ["status"], registry=registry)
        self._ignored_fields = Counter(
            "kvrelay_ignored_fields", "Fields of requests that no known API has, and were ignored.", registry=registry
        ).labels()
        self._pending = Gauge(
            "kvrelay_requests_pending", "Generations of this router that have not ended.", registry=registry
        )
        self._pending_first = Gauge(
            "kvrelay_requests_waiting", "Generations that have no token yet.", registry=registry
        )
        self._held = Gauge("kvrelay_requests_held", "Generations in the admission queue.", registry=registry)
        self._unrenewed = Gauge(
            "kvrelay_nodes_unrenewed",
            "Nodes that answer this router although Redis has no record of them.",
            registry=registry,
        )
        self.attempts_by_mode = {mode: self._attempts.labels(mode) for mode in ("relayed", "local", "pooled")}
        self._by_model: dict[str, ModelMetrics] = {}

    def of_model(self, name: str) -> ModelMetrics:
        """The metrics of requests for the model that nodes registered under this name."""
        found = self._by_model.get(name)
        if found is None:
            found = self._by_model[name] = ModelMetrics(self, name)
        return found

    def watch_nodes(
        self,
        nodes: Callable[[], Iterable[Node]],
        breakers: Breakers,
        roles: Callable[[], Iterable[tuple[str, Role]]],
    ) -> None:
        """Export the nodes that `nodes` returns at each scrape, and for the (model, role) pairs of `roles` how many are
        usable, even if none is.
        """
        self.registry.register(_NodeCollector(nodes, breakers, roles))

    def watch_queue(self, running: Callable[[], int], waiting: Callable[[], int], held: Callable[[], int]) -> None:
        """Export the router's own queue lengths."""
        self._pending.set_function(running)
        self._pending_first.set_function(waiting)
        self._held.set_function(held)

    def watch_records(self, unrenewed: Callable[[], int]) -> None:
        """Export how many nodes answer although their records in Redis have ended."""
        self._unrenewed.set_function(unrenewed)

    def ignored_fields(self, count: int) -> None:
        self._ignored_fields.value += count

    def http_error(self, status: int) -> None:
        """An error response was sent."""
        self._http_errors.labels(str(status)).value += 1

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The metrics of requests for one model. A label look-up per token would cost too much."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._all = metrics
        self._use(name)

    def set_name(self, name: str) -> None:
        """Label metrics with this name of the model from now on."""
        if name != self._name:
            self._use(name)

    def _use(self, name: str) -> None:
        metrics, self._name = self._all, name
        self._success = {reason: metrics.success.labels(name, reason) for reason in ("stop", "length")}
        self._prompt_tokens = metrics.prompt_tokens.labels(name)
        self._generated = metrics.generated.labels(name)
        self._ttft, self._itl = metrics.ttft.labels(name), metrics.itl.labels(name)
        self._e2e = metrics.e2e.labels(name)
        self._decode, self._per_token = metrics.decode.labels(name), metrics.per_token.labels(name)
        self._request_prompt = metrics.request_prompt.labels(name)
        self._request_generated = metrics.request_generated.labels(name)
        self._request_max = metrics.request_max.labels(name)
        self._queue, self._prefill = metrics.queue.labels(name), metrics.prefill.labels(name)
        self._pooled = metrics.pooled.labels(name)

    def attempt(self, mode: str, number: int) -> None:
        """An attempt was placed."""
        self._all.attempts_by_mode[mode].value += 1
        if number > 1:
            self._all.retries.value += 1

    def first_tokens(self, count: int, ttft_s: float) -> None:
        """The first `count` tokens of a request were sent to the client, `ttft_s` after its arrival."""
        self._generated.value += count
        self._ttft.observe(ttft_s)

    def more_tokens(self, count: int, gap_s: float) -> None:
        """`count` more tokens were sent to the client, `gap_s` after the previous ones."""
        self._generated.value += count
        if count:
            self._itl.observe(gap_s / count)

    def leg(self, role: Role, stats: AttemptStats) -> None:
        """A leg reported how it served its attempt."""
        if stats.prefill_s > 0:
            self._queue.observe(stats.queue_s)
            self._prefill.observe(stats.prefill_s)
        if role == "decode":  # both legs may count the bytes of one relay; the receiver's count is used
            self._all.relayed.value += max(stats.relayed_bytes, 0)

    def failed(self, code: str) -> None:
        """A generation ended with an error."""
        self._all.failed.labels(code).value += 1

    def cancelled(self) -> None:
        """The client of a generation disconnected."""
        self._all.cancelled.value += 1

    def finished(self, reason: FinishReason, numbers: Finished) -> None:
        """A request ended with an answer."""
        self._success[reason].value += 1
        self._prompt_tokens.value += numbers.prompt_tokens
        self._e2e.observe(numbers.duration_s)
        self._request_prompt.observe(numbers.prompt_tokens)
        if numbers.max_tokens:
            self._request_generated.observe(numbers.tokens)
            self._request_max.observe(numbers.max_tokens)
        if numbers.tokens > 1:
            self._decode.observe(numbers.decode_s)
            self._per_token.observe(numbers.decode_s / (numbers.tokens - 1))

    def pooled(self, inputs: int, tokens: int, duration_s: float) -> None:
        """A pooling call was answered."""
        self._pooled.value += inputs
        self.finished("stop", Finished(tokens, duration_s))
