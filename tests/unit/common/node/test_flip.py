"""Whether a node can change its role with what it has in memory."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from common.config.service_configs import DecodeConfig, PrefillConfig
from common.node import flip
from common.node.flip import Part, why_restart
from decode_node.role import ROLE as DECODE
from prefill_node.role import ROLE as PREFILL

_P, _D = PrefillConfig(), DecodeConfig(max_num_batched_tokens=99, local_prefill_chunk=7)
NOW, THEN = Part(PREFILL, PREFILL.plan(_P)), Part(DECODE, DECODE.plan(_D))


_IN_FIELDS_OF_THE_PLAN = {
    *("model", "model_impl", "served_model_name", "tokenizer", "task", "max_model_len", "speculate", "lora"),
    *("device", "dtype", "quantization", "kv_cache_dtype", "kv_blocks", "kv_memory_gb", "gpu_memory_utilization"),
    *("tensor_parallel_size", "pipeline_parallel_size", "pp_layers", "async_scheduling"),
    *("prefill_context_parallel", "decode_context_parallel", "data_parallel_attention"),
    *("rebalance_experts", "redundant_experts"),
    *("nnodes", "node_rank", "host", "advertise_host", "redis_url"),
}
"""Options that why_restart compares by what follows from them."""
_READ_AGAIN = {
    *("port", "node_id", "cluster", "admin_host", "admin_port", "admin_token", "in_other_role", "shared_cores"),
    *("max_num_seqs", "max_num_batched_tokens", "local_prefill_chunk"),
    *("speculate_tokens", "speculate_answers", "log_level", "log_format"),
}
"""Options that take effect with each change of the role, or that change nothing in memory."""


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
        ({"async_scheduling": True}, "options that a decode node reads"),
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


def test_each_option_is_compared_or_read_again_with_the_role() -> None:
    by_name = {"may_use_collectives": "allow_plain_collectives"}
    compared = {by_name.get(name, name) for name in (*flip._AT_START, *flip._AMONG_RANKS)} | _IN_FIELDS_OF_THE_PLAN
    assert not compared & _READ_AGAIN
    assert compared | _READ_AGAIN == {field.name for config in (_P, _D) for field in fields(config)}
