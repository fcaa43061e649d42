"""What the comparison's client makes of one completion."""

from __future__ import annotations

import pytest
from bench.peers.arrivals import answered_until, arrival_times, check_length, decode_rate

from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.stream import RequestFailed


def outcome(**more: object) -> RequestOutcome:
    fields = {"ttft_s": 1.0, "itl_s": [0.5, 0.0, 0.5], "output_tokens": 4, **more}
    return RequestOutcome(0, 10.0, **fields)  # type: ignore[arg-type]


def test_events_of_one_read_are_one_arrival() -> None:
    assert arrival_times(outcome()) == [11.0, 11.5, 12.0]


def test_the_decode_rate_counts_the_tokens_after_the_first() -> None:
    assert decode_rate(outcome()) == 3.0


def test_an_answer_of_another_length_is_refused() -> None:
    assert check_length(outcome(), 4).output_tokens == 4
    with pytest.raises(RequestFailed, match="4 tokens came instead of 5"):
        check_length(outcome(), 5)
    with pytest.raises(RequestFailed, match="gone"):
        check_length(outcome(error="connection", detail="gone"), 4)


def test_a_stream_without_a_token_has_no_arrivals() -> None:
    assert arrival_times(outcome(ttft_s=None, itl_s=[])) == []


def test_answered_are_those_whose_first_token_came_in_time() -> None:
    assert answered_until([outcome(), outcome(ttft_s=3.0), outcome(ttft_s=None, itl_s=[]), None], until_s=12.0) == 1
