"""What the stack sampler records of other threads."""

from __future__ import annotations

import json
import threading

from common.base import stack_sampler


def waits_inside(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait(10)


def test_frames_of_other_threads_become_nested_events_with_times() -> None:
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits_inside, args=(begun, end), name="worker")
    thread.start()
    assert begun.wait(10)
    try:
        events = stack_sampler.record(0.03)
    finally:
        end.set()
        thread.join()
    json.dumps(events)
    [name] = [each for each in events if each["ph"] == "M" and each["args"]["name"] == "worker"]
    mine = [each for each in events if each["ph"] == "X" and each["tid"] == name["tid"]]
    outer = next(each for each in mine if each["name"].startswith("waits_inside ("))
    inner = next(each for each in mine if each["name"].startswith("Event.wait ("))
    assert outer["ts"] <= inner["ts"]
    assert outer["ts"] + outer["dur"] >= inner["ts"] + inner["dur"]
    assert outer["dur"] > 20_000
    assert not any(
        "record (" in each["name"] for each in events if each["ph"] == "X" and each["tid"] == threading.get_native_id()
    )
