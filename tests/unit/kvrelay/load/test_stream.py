"""Streams are parsed whatever the way a server writes them; URLs are checked."""

from __future__ import annotations

import pytest
from support.load_events import stream_of, text_event

from kvrelay.load.outcome import read_outcome
from kvrelay.load.stream import Target


@pytest.mark.parametrize(("data", "end"), [(b"data: ", b"\n\n"), (b"data:", b"\r\n\r\n")])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_parsed_in_every_common_spelling(data: bytes, end: bytes, size: int) -> None:
    body = b"".join(data + event + end for event in (text_event("a"), text_event("b"), b"[DONE]"))
    body = b": ping - 12:00:00" + end + body
    stream = stream_of(done=False)
    for at in range(0, len(body), size):
        stream.feed(body[at : at + size], 10.0 + at)
    outcome = read_outcome(0, stream, 0.0)
    assert (outcome.error, len(outcome.itl_s)) == ("", 1)


def test_malformed_url_is_refused() -> None:
    with pytest.raises(ValueError, match="URL"):
        Target("127.0.0.1:8000")
