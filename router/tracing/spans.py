"""The spans of one request, made of its story. Pure.

llm_request                   from arrival to the end
  queue                       in the router's admission queue
  attempt 1                   from its placement to its end; a fault ends it with an error, and attempt 2 is its sibling
    prefill                   from the request's sending to the first token
    relay                     from the decode node's grant to its last layer, by its own report
    decode                    from the first token on
  backoff                     before the next attempt
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.requests.story import TERMINAL

Value = str | int | float | bool
Attributes = Mapping[str, Value]

_FAULTS = frozenset({"leg_failed", "node_lost", "gap"})


@dataclass
class Span:
    """Times in seconds since the request's arrival."""

    name: str
    start_s: float
    parent: Span | None = None
    end_s: float = 0.0
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    events: list[tuple[float, str, Attributes]] = field(default_factory=list[tuple[float, str, Attributes]])
    error: str = ""


def spans_of(story: Mapping[str, Any]) -> list[Span]:
    """The spans of a finished story (`Story.plain`), parents before children."""
    reader = _Reader(story)
    for event in story["events"]:
        reader.read(event["t_s"], event["event"], event["reason"], event["data"] or {})
    return reader.spans


class _Reader:
    def __init__(self, story: Mapping[str, Any]) -> None:
        self._root = Span("llm_request", 0.0, attributes={"gen_ai.request.id": story["request_id"]})
        if story["client_request_id"]:
            self._root.attributes["kvrelay.client_request_id"] = story["client_request_id"]
        self.spans = [self._root]
        self._waiting: Span | None = None
        """The queue, or a backoff."""
        self._attempt: Span | None = None
        self._stage: Span | None = None
        self._attempts = 0
        self._fault = ""
        self._sent_s: dict[tuple[int, str], float] = {}
        """(attempt, role) -> when its request went to the node."""
        self._by_number: dict[int, Span] = {}

    def read(self, t_s: float, event: str, reason: str, data: Mapping[str, Any]) -> None:
        match event:
            case "arrived":
                self._root.attributes |= {
                    "gen_ai.usage.input_tokens": data.get("prompt_tokens", 0),
                    "gen_ai.request.max_tokens": data.get("max_tokens", 0),
                }
            case "queued" | "waiting_for_node" | "backoff":
                self._end_attempt(t_s)
                self._waiting = self._begin("queue" if event == "queued" else event, t_s, self._root)
                self._waiting.attributes["kvrelay.reason"] = reason
            case "decision":
                self._place(t_s, data)
            case "sent":
                if self._attempt is not None and self._stage is None:
                    self._stage = self._begin("prefill", t_s, self._attempt)
                self._sent_s.setdefault((self._attempts, reason.removesuffix("Request").lower()), t_s)
                self._note(t_s, event, {"kvrelay.message": reason, "kvrelay.node": str(data.get("node", ""))})
            case "timeline":
                self._read_timeline(data)
            case "first_token" | "resumed":
                if event == "first_token":
                    self._root.attributes["gen_ai.latency.time_to_first_token"] = t_s
                self._end(self._stage, t_s)
                self._stage = None if self._attempt is None else self._begin("decode", t_s, self._attempt)
                self._note(t_s, event, {})
            case _ if event in _FAULTS:
                self._fault = f"{event}: {reason}"
                self._note(t_s, event, {"kvrelay.reason": reason, "kvrelay.node": str(data.get("node", ""))})
            case "retry":
                self._fault = self._fault or reason
                self._end_attempt(t_s)
            case _ if event in TERMINAL:
                self._finish(t_s, event, reason, data)
            case _:
                self._note(t_s, event, {"kvrelay.reason": reason} if reason else {})

    def _place(self, t_s: float, data: Mapping[str, Any]) -> None:
        self._end_attempt(t_s)
        self._end(self._waiting, t_s)
        self._waiting = None
        self._attempts += 1
        self._attempt = self._begin(f"attempt {self._attempts}", t_s, self._root)
        self._by_number[self._attempts] = self._attempt
        self._attempt.attributes |= {
            "kvrelay.attempt": self._attempts,
            "kvrelay.prefill_mode": str(data.get("mode", "")),
            "kvrelay.reason": str(data.get("reason", "")),
        }
        for leg in ("prefill", "decode"):
            placed: Mapping[str, object] = data.get(leg) or {}
            node = placed.get("node")
            if node:
                self._attempt.attributes[f"kvrelay.{leg}_node"] = str(node)

    def _read_timeline(self, data: Mapping[str, Any]) -> None:
        """A node's marks count from the arrival of its request, which is taken for the time at which it was sent."""
        attempt, role = self._by_number.get(data["attempt"]), str(data["role"])
        sent_s = self._sent_s.get((data["attempt"], role))
        if attempt is None or sent_s is None:
            return
        marks = [(str(name), sent_s + at_s, int(number)) for name, at_s, number in data["marks"]]
        if role == "prefill":
            attempt.events += [(t_s, f"prefill {name}", {"kvrelay.number": number}) for name, t_s, number in marks]
        times = {name: t_s for name, t_s, _ in marks}
        if role == "decode" and "grant" in times and "received" in times:
            relay = self._begin("relay", times["grant"], attempt)
            relay.end_s = times["received"]
            layers = [(t_s, number) for name, t_s, number in marks if name == "layer"]
            relay.events += [(t_s, "layer", {"kvrelay.layer": number}) for t_s, number in layers]

    def _finish(self, t_s: float, event: str, reason: str, data: Mapping[str, Any]) -> None:
        if event == "failed":
            self._root.error = self._fault = reason
        self._end_attempt(t_s)
        self._end(self._waiting, t_s)
        self._root.end_s = t_s
        self._root.attributes |= {"gen_ai.latency.e2e": t_s, "kvrelay.attempts": self._attempts}
        self._root.attributes["gen_ai.response.finish_reasons"] = reason if event == "finished" else event
        for name, key in (
            ("completion_tokens", "gen_ai.usage.output_tokens"),
            ("cached_tokens", "gen_ai.usage.cached_tokens"),
            ("relayed_bytes", "kvrelay.relayed_bytes"),
        ):
            if name in data:
                self._root.attributes[key] = data[name]

    def _begin(self, name: str, t_s: float, parent: Span) -> Span:
        span = Span(name, t_s, parent)
        self.spans.append(span)
        return span

    def _end(self, span: Span | None, t_s: float) -> None:
        if span is not None:
            span.end_s = t_s

    def _end_attempt(self, t_s: float) -> None:
        self._end(self._stage, t_s)
        self._end(self._attempt, t_s)
        if self._attempt is not None:
            self._attempt.error = self._fault
        self._stage = self._attempt = None
        self._fault = ""

    def _note(self, t_s: float, event: str, attributes: Attributes) -> None:
        (self._attempt or self._root).events.append((t_s, event, attributes))
