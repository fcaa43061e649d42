from __future__ import annotations

import pytest

from common.control.messages import NodeLoad
from router.planner.demand import WINDOW_S, DemandMeter, Sample, decode_slots


def prefill(tokens: int, queued: int = 0, name: str = "p") -> Sample:
    return Sample("prefill", name, NodeLoad(prompt_tokens=tokens, queued_tokens=queued))


def decode(tokens: int, waiting: int = 0, name: str = "d") -> Sample:
    return Sample("decode", name, NodeLoad(generated_tokens=tokens, waiting=waiting))


def test_rates_count_what_was_done_and_what_waits() -> None:
    meter = DemandMeter()
    meter.add(0, [prefill(5000), decode(700)])
    assert meter.demand(100).span_s == 0
    meter.add(100, [prefill(15_000), decode(1700)])
    assert meter.demand(100) == (demand := meter.demand(100))
    assert (demand.span_s, demand.prompt_tokens_s, demand.generated_tokens_s) == (100, 100, 10)
    meter.add(100 + WINDOW_S, [prefill(27_000, queued=6000), decode(2900, waiting=6)])
    demand = meter.demand(100)
    assert demand.span_s == WINDOW_S
    assert demand.prompt_tokens_s == pytest.approx(18_000 / WINDOW_S)
    assert demand.generated_tokens_s == pytest.approx((1200 * 1.5 + 6 * 100) / WINDOW_S)


def test_nodes_that_come_go_and_restart_do_not_count_twice_or_below_zero() -> None:
    meter = DemandMeter()
    meter.add(0, [prefill(1_000_000)])
    meter.add(50, [prefill(1_000_500), prefill(9_000_000, name="new")])
    meter.add(100, [prefill(9_000_500, name="new")])
    assert meter.demand(100).prompt_tokens_s == 10
    meter.add(110, [prefill(0, name="new")])
    assert meter.demand(100).prompt_tokens_s == pytest.approx(1000 / 110)


def test_memory_bounds_the_batch_only_when_it_fills() -> None:
    assert decode_slots([], 64) == 64
    assert decode_slots([NodeLoad(running=1, kv_blocks_used=400, kv_blocks_total=1000)], 64) == 64
    assert decode_slots([NodeLoad(running=12, kv_blocks_used=900, kv_blocks_total=1000)], 64) == pytest.approx(
        13.3, 0.01
    )
