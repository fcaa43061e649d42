"""The node's log of traffic."""

from __future__ import annotations

from common.engine.kv_transfer import Traffic
from common.node.traffic import MAX_PAIRS, TrafficLog


def test_log_is_bounded_and_keeps_the_latest() -> None:
    log = TrafficLog()
    for number in range(MAX_PAIRS + 5):
        log.add("to", f"n{number}", "i", [Traffic(0, 0, "zmq", "", 1)])
    assert len(log.pairs) == MAX_PAIRS
    assert log.pairs[-1].peer == f"n{MAX_PAIRS + 4}"
