"""Whether a node can change its role with what it has in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.config.service_configs import DecodeConfig, PrefillConfig
from common.node import flip
from common.node.flip import Part, why_restart
from decode_node.role import ROLE as DECODE
from prefill_node.role import ROLE as PREFILL

_P, _D = PrefillConfig(), DecodeConfig(max_num_batched_tokens=99, local_prefill_chunk=7)
NOW, THEN = Part(PREFILL, PREFILL.plan(_P)), Part(DECODE, DECODE.plan(_D))


def as_decode(**options: object) -> Part:
    config = replace(_D, **options)
    return Part(DECODE, DECODE.plan(config))


def test_equal_layouts_of_one_rank_change_in_place_both_ways() -> None:
    assert why_restart(NOW, THEN) == ""
    assert why_restart(THEN, NOW) == ""


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor_parallel_size": 2}, "as a decode node it has another layout (2 ranks, now 1 rank)"),
        ({"nice": 5}, "options that a decode node reads at its start are different"),
        ({"threads": 1}, "options that a decode node reads"),
        ({"kv_blocks": 77}, "options that a decode node reads"),
        ({"max_loras": 3}, "options that a decode node reads"),
    ],
)
def test_what_a_process_cannot_change_needs_a_restart(options: dict[str, object], why: str) -> None:
    assert why in why_restart(NOW, as_decode(**options))


def test_a_prefill_node_that_lacks_what_small_batches_need_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flip, "find_native", lambda: None)
    assert "small batches" in why_restart(NOW, THEN)
    assert why_restart(THEN, NOW) == ""


def test_equal_ranks_change_in_place_and_other_deadlines_between_them_need_a_restart() -> None:
    two = {"tensor_parallel_size": 2}
    config = replace(_P, **two)
    now = Part(PREFILL, PREFILL.plan(config))
    assert why_restart(now, as_decode(**two)) == ""
    assert why_restart(as_decode(**two), now) == ""
    assert "options that a decode node reads" in why_restart(now, as_decode(**two, lease_s=9.0))
