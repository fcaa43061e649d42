"""The result of one request: reduces a finished stream to a few numbers. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvrelay.load.stream import RequestFailed, Stream


@dataclass
class RequestOutcome:
    """One request, as its client saw it. Times are in seconds."""

    number: int
    sent_s: float
    """Time of sending, since the start of the run."""
    late_s: float = 0.0
    """Delay of sending, caused by the load generator itself."""
    error: str = ""
    """Short kind of error, for counting; empty on success."""
    detail: str = ""
    ended_s: float = 0.0
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list[float])
    """Gaps between arrivals of events with tokens; 0 for events that arrive together."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill: str = ""
    """relayed or local, from x-kvrelay-prefill-mode."""
    prefill_node: str = ""
    decode_node: str = ""
    attempts: int = 1
    relayed_bytes: int = 0

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for answers of one token."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


def read_outcome(number: int, stream: Stream, start_s: float, late_s: float = 0.0) -> RequestOutcome:
    """The outcome of a finished stream."""
    outcome = RequestOutcome(number, stream.sent_s - start_s, late_s, ended_s=stream.ended_s - start_s)
    outcome.prefill = stream.headers.get("x-kvrelay-prefill-mode", "")
    outcome.prefill_node = stream.headers.get("x-kvrelay-prefill-node", "")
    outcome.decode_node = stream.headers.get("x-kvrelay-decode-node", "")
    attempt = stream.headers.get("x-kvrelay-attempt", "1")
    outcome.attempts = int(attempt) if attempt.isdigit() else 1
    try:
        _read_events(stream, outcome)
        if stream.error is not None:
            raise stream.error
        if not stream.done:
            raise RequestFailed("the stream ended without [DONE]", "incomplete")
    except RequestFailed as error:
        outcome.error, outcome.detail = error.kind, str(error)[:300]
    except (ValueError, AttributeError, TypeError) as error:
        outcome.error, outcome.detail = "bad event", str(error)[:300]
    return outcome


def _read_events(stream: Stream, outcome: RequestOutcome) -> None:
    """Raises: RequestFailed for an error event."""
    times: list[float] = []
    for arrived_s, data in stream.events:
        event: dict[str, Any] = json.loads(data)
        if isinstance(event.get("kvrelay"), Mapping):
            _read_served(event["kvrelay"], outcome)
        error: Any = event.get("error")
        if error is not None:
            code = cast("Mapping[str, Any]", error).get("code") if isinstance(error, Mapping) else None
            raise RequestFailed(str(cast("Any", error)), f"stream: {code or 'error'}")
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            times.append(arrived_s)
        usage: dict[str, Any] = event.get("usage") or {}
        if usage:
            cached: dict[str, Any] = usage.get("prompt_tokens_details") or {}
            outcome.prompt_tokens = usage.get("prompt_tokens", 0)
            outcome.output_tokens = usage.get("completion_tokens", 0)
            outcome.cached_tokens = cached.get("cached_tokens") or 0
    if times:
        outcome.ttft_s = times[0] - stream.sent_s
        outcome.itl_s = [b - a for a, b in itertools.pairwise(times)]
        outcome.output_tokens = outcome.output_tokens or len(times)


def _read_served(served: Mapping[str, Any], outcome: RequestOutcome) -> None:
    """Read how the request was finally served; the headers only say how it began."""
    outcome.prefill = str(served.get("prefill_mode", outcome.prefill))
    outcome.prefill_node = str(served.get("prefill_node", ""))
    outcome.decode_node = str(served.get("decode_node", outcome.decode_node))
    outcome.attempts = int(served.get("attempt", outcome.attempts))
    outcome.relayed_bytes = int(served.get("relayed_bytes", 0))


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta: dict[str, Any] = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    spoken = delta.get("content") or reasoning or delta.get("tool_calls")
    return bool(choice.get("text") or spoken or choice.get("token_ids"))
