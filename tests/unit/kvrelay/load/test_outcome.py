"""The outcome of one request, from the events of its stream."""

from __future__ import annotations

import pytest
from support.load_events import USAGE, event, stream_of, text_event

from kvrelay.load.outcome import read_outcome
from kvrelay.load.stream import RequestFailed


def test_latencies_count_only_events_with_tokens() -> None:
    stream = stream_of(
        (10.1, event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])),
        (10.2, event(choices=[{"index": 0, "delta": {"content": "a"}}])),
        (10.5, event(choices=[{"index": 0, "delta": {"content": "b"}}])),
        (10.5, event(choices=[{"index": 0, "delta": {"content": "c"}}])),
        (10.9, event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])),
        (10.9, event(choices=[], usage=USAGE)),
    )
    stream.headers = {"x-kvrelay-prefill-mode": "relayed", "x-kvrelay-decode-node": "d0", "x-kvrelay-attempt": "2"}
    outcome = read_outcome(5, stream, start_s=9.0)
    assert outcome.error == ""
    assert outcome.ttft_s == pytest.approx(0.2)
    assert outcome.itl_s == pytest.approx([0.3, 0.0])
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (40, 16, 3)
    assert outcome.tpot_s == pytest.approx(0.4)
    assert (outcome.sent_s, outcome.e2e_s) == pytest.approx((1.0, 1.0))
    assert (outcome.prefill, outcome.decode_node, outcome.attempts) == ("relayed", "d0", 2)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_reasoning_counts_as_the_first_token_under_either_name(name: str) -> None:
    stream = stream_of(
        (10.2, event(choices=[{"index": 0, "delta": {name: "a"}}])), (10.9, event(choices=[], usage=USAGE))
    )
    assert read_outcome(0, stream, start_s=9.0).ttft_s == pytest.approx(0.2)


def test_the_last_event_of_a_stream_says_how_it_was_finally_served() -> None:
    served = {"prefill_mode": "local", "decode_node": "d1", "attempt": 2, "relayed_bytes": 7}
    stream = stream_of((10.2, text_event("a")), (10.9, event(choices=[], usage=USAGE, kvrelay=served)))
    stream.headers = {
        "x-kvrelay-prefill-mode": "relayed",
        "x-kvrelay-prefill-node": "p0",
        "x-kvrelay-decode-node": "d0",
    }
    outcome = read_outcome(0, stream, 0.0)
    assert (outcome.prefill, outcome.prefill_node, outcome.decode_node) == ("local", "", "d1")
    assert (outcome.attempts, outcome.relayed_bytes) == (2, 7)


def test_a_stream_that_breaks_off_or_carries_an_error_is_an_error() -> None:
    broken = stream_of((10.2, text_event("a")), done=False)
    assert read_outcome(0, broken, 0.0).error == "incomplete"
    failed = stream_of((10.2, text_event("a")), (10.3, event(error={"code": "overloaded", "message": "no"})))
    assert read_outcome(0, failed, 0.0).error == "stream: overloaded"
    assert read_outcome(0, stream_of((10.2, b"{")), 0.0).error == "bad event"
    refused = stream_of(status=429)
    refused.error = RequestFailed("HTTP 429: busy", "HTTP 429")
    assert read_outcome(0, refused, 0.0).error == "HTTP 429"
