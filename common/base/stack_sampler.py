"""Records what this process's Python threads do, as events of a Chrome trace, which Perfetto opens.

A thread of its own samples the stacks of all threads, so the running code is not changed. Source: the format is Chrome's
"Trace Event Format"; the idea is py-spy's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_PERIOD_S = 0.005
_MAX_EVENTS = 400_000


@dataclass
class _Thread:
    tid: int
    name: str
    stack: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Each frame's name, and since when it is there, outermost first. Two calls of the same code count as the same frame."""


def record(seconds: float) -> list[dict[str, Any]]:
    """Return the events of the next `seconds`. It blocks; call it on a thread of its own.

    Times are in microseconds since the epoch. A frame that is on the stack in consecutive samples is one event.
    """
    own = threading.get_ident()
    threads: dict[int, _Thread] = {}
    events: list[dict[str, Any]] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and len(events) < _MAX_EVENTS:
        now_us = time.time() * 1e6
        known = {thread.ident: thread for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
            if ident == own:
                continue
            if ident not in threads:
                thread = known.get(ident)
                tid = (thread.native_id if thread is not None else None) or ident
                threads[ident] = _Thread(tid, thread.name if thread is not None else "unknown")
            _update(threads[ident], _names(frame), now_us, events)
        time.sleep(_PERIOD_S)
    end_us = time.time() * 1e6
    for thread in threads.values():
        _update(thread, [], end_us, events)
    named = {"ph": "M", "name": "thread_name", "pid": os.getpid()}
    return [{**named, "tid": thread.tid, "args": {"name": thread.name}} for thread in threads.values()] + events


def _names(frame: FrameType | None) -> list[str]:
    """Names of the frames of a stack, outermost first."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        file = "/".join(code.co_filename.split("/")[-2:])
        names.append(f"{code.co_qualname} ({file}:{code.co_firstlineno})")
        frame = frame.f_back
    return names[::-1]


def _update(thread: _Thread, names: list[str], now_us: float, events: list[dict[str, Any]]) -> None:
    """End the frames that are no longer on the stack, and begin new ones."""
    same = 0
    while same < min(len(names), len(thread.stack)) and thread.stack[same][0] == names[same]:
        same += 1
    for name, since_us in reversed(thread.stack[same:]):
        event = {"ph": "X", "cat": "python", "name": name, "pid": os.getpid(), "tid": thread.tid}
        events.append({**event, "ts": since_us, "dur": now_us - since_us})
    thread.stack[same:] = [(name, now_us) for name in names[same:]]
