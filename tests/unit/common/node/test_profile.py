"""A node's profile."""

from __future__ import annotations

import json

from common.node.profile import device_facts, with_events


def test_stacks_are_added_to_a_trace_of_pytorch_on_its_time_scale() -> None:
    trace = b'{"baseTimeNanoseconds": 1000000, "traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 5.0}], "traceName": "t"}'
    events = [{"ph": "M", "name": "thread_name"}, {"ph": "X", "name": "f", "ts": 1500.0, "dur": 1.0}]
    merged = json.loads(with_events(trace, events))
    assert [(each["name"], each.get("ts")) for each in merged["traceEvents"]] == [
        ("thread_name", None),
        ("f", 500.0),
        ("aten::mm", 5.0),
    ]
    assert json.loads(with_events(trace, [])) == json.loads(trace)


def test_a_process_without_a_gpu_has_no_devices() -> None:
    assert device_facts() == {"gpus": [], "gpus_apart": []}
