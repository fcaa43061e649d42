"""Tables of the comparison: medians, ratios within a round, shares of bounds."""

from __future__ import annotations

import math

import pytest
from bench.peers.report import LINES, Limits, bounds_in_words, markdown, ratio, share_of_bound, table, typical
from bench.shape import SHAPES

LINE = {line.key: line for line in LINES}
SHAPE = SHAPES["0.5b"]
LIMITS = Limits(read=SHAPE.weight_bytes_per_token() * 30.0, product=SHAPE.prefill_flop(2048) / 5)
"""A machine that allows 30 tokens/s, and 2,048 tokens in five seconds."""


def test_a_figure_is_the_median_of_the_rounds_that_have_it() -> None:
    rounds = [{"batch": 5.0}, {}, {"batch": 1.0}, {"batch": math.nan}, {"batch": 2.0}]
    assert typical(rounds, "batch") == 2.0
    assert math.isnan(typical(rounds, "ttft_512"))


def test_a_ratio_above_one_means_better_for_rates_and_for_times() -> None:
    assert ratio(LINE["one_stream"], [{"one_stream": 30.0}], [{"one_stream": 20.0}]) == 1.5
    assert ratio(LINE["ttft_512"], [{"ttft_512": 2.0}], [{"ttft_512": 3.0}]) == 1.5
    assert ratio(LINE["ttft_512"], [{"ttft_512": 2.0}], [{"ttft_512": math.inf}]) == math.inf


def test_ratios_are_taken_within_a_round_so_that_drift_cancels() -> None:
    ours = [{"batch": 10.0}, {"batch": 40.0}, {"batch": 20.0}]
    theirs = [{"batch": 5.0}, {"batch": 20.0}, {}]
    assert ratio(LINE["batch"], ours, theirs) == 2.0
    assert math.isnan(ratio(LINE["batch"], ours, []))


def test_a_share_compares_with_the_bound_of_the_same_round() -> None:
    slower = Limits(LIMITS.read / 2, LIMITS.product / 2)
    rounds = [{"one_stream": 15.0, "ttft_2048": 10.0}, {"one_stream": 7.5, "ttft_2048": 20.0}]
    assert share_of_bound(LINE["one_stream"], rounds, [LIMITS, slower], SHAPE) == pytest.approx(0.5)
    assert share_of_bound(LINE["ttft_2048"], rounds, [LIMITS, slower], SHAPE) == pytest.approx(0.5)
    assert math.isnan(share_of_bound(LINE["batch_itl_p99"], rounds, [LIMITS], SHAPE))


def test_a_step_is_bound_by_reading_or_by_its_products() -> None:
    weights = SHAPE.weight_bytes_per_token()
    machine = Limits(read=float(weights), product=4.0 * weights)
    assert machine.step_s(SHAPE, rows=1) == machine.step_s(SHAPE, rows=4) == 1.0
    assert machine.step_s(SHAPE, rows=8) == 2.0


def test_the_table_has_a_column_per_measured_system_and_a_row_per_measured_line() -> None:
    rounds = {
        "kvrelay": [{"one_stream": 24.0, "long_ttft": 1.0}],
        "vllm": [{"one_stream": 16.0, "long_ttft": math.inf}],
        "absent": [{}],
    }
    rows = table(SHAPE, [LIMITS], rounds, {"vllm": "vLLM", "absent": "never"})
    assert rows[0] == ["0.5b", "kvrelay", "of its bound", "vLLM"]
    assert rows[1] == ["one stream, tokens/s", "24", "80%", "16 (1.50 x)"]
    assert rows[2][1:] == ["1,000", "", "none answered"]
    assert len(rows) == 3
    assert markdown(rows[:2]).splitlines()[1] == "|---|---|---|---|"


def test_a_table_without_our_own_figures_still_shows_the_peers() -> None:
    rows = table(SHAPE, [LIMITS], {"kvrelay": [{}], "vllm": [{"batch": 97.0}]}, {"vllm": "vLLM"})
    assert rows[1][1:] == ["", "", "97"]


def test_the_limits_of_all_rounds_are_named() -> None:
    words = bounds_in_words([Limits(31e9, 400e9), Limits(36e9, 450e9)])
    assert words == "memory read 31 to 36 GB/s, the faster of bfloat16 and float32 products 400 to 450 GFLOP/s"
