"""What ranks hold is what they build, by arithmetic; what no memory could hold is refused with the figures."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.node.holdings import check_fits, node_holdings, report_holdings
from common.node.plan import plan_node


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "granite-moe", "llama"])
def test_one_rank_holds_all_matrices_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    model = make_tiny(name, tmp_path / name)
    stored = {
        key: tensor.numel()
        for file in model.glob("*.safetensors")
        for key, tensor in load_file(file).items()
        if tensor.dim() > 1
    }
    plan = plan_node(DecodeConfig(model=str(model), dtype="float32"))
    (alone,) = node_holdings(plan.model_config, plan.layout)
    assert alone.num_weights == sum(stored.values())
    assert alone.kv_bytes == plan.layout.spec.bytes_per_token


def test_ranks_share_experts_layers_and_kv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_tiny("qwen3-moe", tmp_path / "qwen3-moe")
    config = DecodeConfig(model=str(model), dtype="float32", tensor_parallel_size=2)
    plan = plan_node(config, pp_layers="2,1")
    found = node_holdings(plan.model_config, plan.layout)
    assert [each.experts for each in found] == [(0, 4, 8), (4, 8, 8)] * 2
    assert [each.num_mixtures for each in found] == [1, 1, 1, 1]  # layer 1 is dense
    assert sum(each.kv_bytes for each in found) == plan.layout.spec.bytes_per_token
    with caplog.at_level(logging.INFO):
        report_holdings(plan)
    lines = [record.message for record in caplog.records if "holds" in record.message]
    assert len(lines) == 4
    assert lines[1].startswith("rank 1 holds layers 0-1, experts 4-7 of 8 in 1 of them, ")
    assert lines[1].endswith(f" GB in 32 bits), and {2 * 2 * 32 * 4} bytes of KV for a token")


def test_weights_that_fit_in_no_memory_are_refused_with_the_figures() -> None:
    check_fits(10**9, 16, 2e9)
    says = r"671,000,000,000 weights take at least 1249.8 GB in 16 bits, and this machine has 64.0 GB of memory"
    with pytest.raises(ConfigError, match=says):
        check_fits(671 * 10**9, 16, 64 * 2**30)
