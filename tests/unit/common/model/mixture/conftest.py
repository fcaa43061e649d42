"""What tests of mixtures share."""

from __future__ import annotations

import pytest
from support.expert_jobs import EXPERTS, TOP_K
from support.oracle import write_model
from transformers import Qwen3MoeConfig


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model of one layer, whose MLP is a mixture."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    return str(write_model(config, tmp_path_factory.mktemp("mixture")))
