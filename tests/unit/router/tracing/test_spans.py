"""A request's story as spans, and as what a collector gets."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.requests.request import TraceContext
from router.requests.story import Story
from router.tracing.exporter import Traces
from router.tracing.spans import spans_of

DECISION = {"mode": "relayed", "reason": "why", "prefill": {"node": "p0"}, "decode": {"node": "d0"}}


def story(*events: tuple[float, str, str, dict[str, Any] | None]) -> dict[str, Any]:
    now = 0.0
    told = Story("cmpl-1", "mine", clock=lambda: now)
    for t_s, event, reason, data in events:
        now = t_s
        told.add(event, reason, data)
    return told.plain()


SURVIVOR = story(
    (0.0, "arrived", "", {"prompt_tokens": 100, "max_tokens": 9}),
    (0.0, "queued", "no room", None),
    (0.5, "decision", "attempt 1", DECISION),
    (0.6, "sent", "PrefillRequest", {"node": "p0"}),
    (1.0, "first_token", "", None),
    (1.5, "node_lost", "d0 is gone", {"node": "d0"}),
    (1.6, "retry", "a node was lost", None),
    (1.6, "backoff", "later", {"seconds": 0.1}),
    (1.7, "decision", "attempt 2", {**DECISION, "decode": {"node": "d1"}}),
    (1.7, "sent", "DecodeRequest", {"node": "d1"}),
    (2.0, "resumed", "", None),
    (
        2.1,
        "timeline",
        "",
        {"attempt": 2, "role": "decode", "marks": [("grant", 0.1, 0), ("layer", 0.15, 3), ("received", 0.2, 0)]},
    ),
    (2.1, "timeline", "", {"attempt": 7, "role": "decode", "marks": []}),
    (3.0, "finished", "stop", {"completion_tokens": 9, "cached_tokens": 16, "relayed_bytes": 5}),
)


def test_an_attempt_after_a_fault_is_the_sibling_of_the_one_that_failed() -> None:
    spans = spans_of(SURVIVOR)
    shown = [
        (each.name, each.parent.name if each.parent else "", round(each.start_s, 6), round(each.end_s, 6))
        for each in spans
    ]
    assert shown == [
        ("llm_request", "", 0.0, 3.0),
        ("queue", "llm_request", 0.0, 0.5),
        ("attempt 1", "llm_request", 0.5, 1.6),
        ("prefill", "attempt 1", 0.6, 1.0),
        ("decode", "attempt 1", 1.0, 1.6),
        ("backoff", "llm_request", 1.6, 1.7),
        ("attempt 2", "llm_request", 1.7, 3.0),
        ("prefill", "attempt 2", 1.7, 2.0),
        ("decode", "attempt 2", 2.0, 3.0),
        ("relay", "attempt 2", 1.8, 1.9),
    ]
    assert [each.error for each in spans if each.error] == ["node_lost: d0 is gone"]
    assert spans[0].attributes["gen_ai.usage.output_tokens"] == 9
    assert spans[0].attributes["kvrelay.attempts"] == 2
    assert spans[6].attributes["kvrelay.decode_node"] == "d1"


def test_every_story_gives_spans_that_end() -> None:
    for last in (("failed", "unavailable: no node"), ("cancelled", "gone"), ("finished", "stop")):
        for count in range(len(SURVIVOR["events"])):
            events = [(e["t_s"], e["event"], e["reason"], e["data"]) for e in SURVIVOR["events"][:count]]
            spans = spans_of(story(*events, (9.0, *last, None)))
            assert spans[0].end_s == 9.0
            assert all(each.end_s >= each.start_s for each in spans)
            assert bool(spans[0].error) == (last[0] == "failed")


def test_a_collector_gets_one_trace_below_the_clients_span() -> None:
    memory = InMemorySpanExporter()
    traces = Traces("http://localhost:1", memory)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    traces.record(SURVIVOR, TraceContext(parent, "vendor=1"))
    traces.record(SURVIVOR, TraceContext("not a traceparent"))
    traces.close()
    spans = memory.get_finished_spans()
    ours = [span for span in spans if f"{span.context.trace_id:032x}" == parent.split("-")[1]]
    assert len(ours) == len(spans) // 2 == 10
    [root] = [span for span in ours if span.name == "llm_request"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.resource.attributes["service.name"] == "kvrelay"
    by_id = {span.context.span_id: span for span in ours}
    assert {by_id[span.parent.span_id].name for span in ours if span.parent and span.name == "decode"} == {
        "attempt 1",
        "attempt 2",
    }
    assert [(event.name) for event in next(span for span in ours if span.name == "attempt 1").events] == [
        "sent",
        "first_token",
        "node_lost",
    ]
