"""Prometheus metrics of the router, in a separate registry. Metrics that mean the same as in vLLM have vLLM's names.

Updated on the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from common.base.errors import KvRelayError
from common.control.messages import AttemptStats, FinishReason, Role
from router.counters import Counter, Histogram

_LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)

_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_COUNTS = (1, 2, 3, 4, 5, 10, 20)


@dataclass(slots=True)
class Finished:
    """Numbers of an answered request."""

    prompt_tokens: int
    duration_s: float
    tokens: int = 0
    max_tokens: int = 0
    decode_s: float = 0.0
    """From the first token to the last."""
    prefill_s: float = 0.0
    """From the last attempt's first step to its first token."""
    preemptions: int = 0


class Metrics:
    """All metrics of one router process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
            return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)

        self.success = counter("vllm:request_success", "Requests answered.", "model_name", "finished_reason")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of answered requests.", "model_name")
        self.generated = counter("vllm:generation_tokens", "Tokens sent to clients.", "model_name")
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
        self.request_n = histogram("vllm:request_params_n", "Answers that a request asks for.", _COUNTS)
        self.request_max_tokens = histogram(
            "vllm:request_params_max_tokens", "Tokens that a request allows for an answer.", _TOKENS
        )
        self.preemptions = histogram("vllm:request_num_preemptions", "Preemptions of a request.", _COUNTS)
        self.inference = histogram(
            "vllm:request_inference_time_seconds", "Time from a request's first step to its last token."
        )
        self.pooled = counter("kvrelay_pooled_inputs", "Inputs of pooling models that were answered.", "model_name")
        self.failed = counter("kvrelay_request_failed", "Requests that failed.", "code")
        self.cancelled = counter("kvrelay_request_cancelled", "Requests whose client disconnected.").labels()
        self.relayed = counter("kvrelay_relayed_bytes", "KV bytes relayed for requests.").labels()
        attempts = counter("kvrelay_attempts", "Attempts placed, by prefill mode.", "mode")
        self.attempts_by_mode = {mode: attempts.labels(mode) for mode in ("relayed", "local", "pooled")}
        self.retries = counter("kvrelay_retries", "Attempts beyond a request's first.").labels()
        self._http_errors = counter("kvrelay_http_errors", "Error responses, by status.", "status")
        self._refused = counter("vllm:num_requests_rejected", "Requests refused, by the error's code.", "reason")
        text = "Fields of requests that no known API has, and were ignored."
        self._ignored_fields = counter("kvrelay_ignored_fields", text).labels()
        text = "Nodes that answer this router although Redis has no record of them."
        self._unrenewed = Gauge("kvrelay_nodes_unrenewed", text, registry=self.registry)
        self._desired: dict[str, Gauge] = {}
        self._by_model: dict[str, ModelMetrics] = {}

    def of_model(self, name: str) -> ModelMetrics:
        """The metrics of requests for the model that nodes registered under this name."""
        found = self._by_model.get(name)
        if found is None:
            found = self._by_model[name] = ModelMetrics(self, name)
        return found

    def watch_queue(self, running: Callable[[], int], waiting: Callable[[], int], held: Callable[[], int]) -> None:
        """Export the router's own queue lengths."""
        self._watch("kvrelay_requests_pending", "Generations of this router that have not ended.", running)
        self._watch("kvrelay_requests_waiting", "Generations that have no token yet.", waiting)
        self._watch("kvrelay_requests_held", "Generations in the admission queue.", held)

    def watch_records(self, unrenewed: Callable[[], int]) -> None:
        """Export how many nodes answer although their records in Redis have ended."""
        self._unrenewed.set_function(unrenewed)

    def _watch(self, name: str, text: str, read: Callable[[], int]) -> None:
        Gauge(name, text, registry=self.registry).set_function(read)

    def export_desired(self, role: str, count: int) -> None:
        """Export how many nodes of a role the cluster is to have.

        Before the first call there is no such metric: an autoscaler must not take a missing number for zero.
        """
        if role not in self._desired:
            text = f"{role.capitalize()} nodes that the cluster is to have."
            self._desired[role] = Gauge(f"kvrelay_desired_{role}_nodes", text, registry=self.registry)
        self._desired[role].set(count)

    def ignored_fields(self, count: int) -> None:
        self._ignored_fields.value += count

    def http_error(self, error: KvRelayError) -> None:
        """Count an error response, and a refusal if its status is below 500."""
        self._http_errors.labels(str(error.http_status)).value += 1
        if error.http_status < 500:
            self._refused.labels(error.code).value += 1

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
        self._request_n = metrics.request_n.labels(name)
        self._request_max_tokens = metrics.request_max_tokens.labels(name)
        self._preemptions, self._inference = metrics.preemptions.labels(name), metrics.inference.labels(name)
        self._queue, self._prefill = metrics.queue.labels(name), metrics.prefill.labels(name)
        self._pooled = metrics.pooled.labels(name)

    def attempt(self, mode: str, number: int) -> None:
        """An attempt was placed."""
        self._all.attempts_by_mode[mode].value += 1
        if number > 1:
            self._all.retries.value += 1

    def asked(self, answers: int) -> None:
        """A request for this many answers to each prompt was accepted."""
        self._request_n.observe(answers)

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
            self._request_max_tokens.observe(numbers.max_tokens)
            self._inference.observe(numbers.prefill_s + numbers.decode_s)
            self._preemptions.observe(numbers.preemptions)
        if numbers.tokens > 1:
            self._decode.observe(numbers.decode_s)
            self._per_token.observe(numbers.decode_s / (numbers.tokens - 1))

    def pooled(self, inputs: int, tokens: int, duration_s: float) -> None:
        """A pooling call was answered."""
        self._pooled.value += inputs
        self.finished("stop", Finished(tokens, duration_s))
