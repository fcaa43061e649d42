"""SSE events and finished streams for tests of the load generator."""

from __future__ import annotations

import json
from typing import Any

from kvrelay.load.stream import Stream

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


def event(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def text_event(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text}])


def stream_of(*events: tuple[float, bytes], status: int = 200, done: bool = True) -> Stream:
    """A stream with these (arrival, data) events: sent at 10 s, ended at 11 s."""
    stream = Stream(b"")
    stream.status, stream.sent_s, stream.done = status, 10.0, done
    stream.events = list(events)
    stream.ended_s = 11.0
    stream.ended.set()
    return stream
