"""--data-parallel-attention: the layout that it gives, and what is refused in one sentence before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig, UpConfig
from common.node.holdings import node_holdings
from common.node.plan import NodePlan, fit_memory, plan_node


def plan(folder: Path, model: str, ranks: int, pp_size: int = 1, **options: Any) -> NodePlan:
    config = DecodeConfig(
        model=str(make_tiny(model, folder / model)),
        tensor_parallel_size=ranks,
        data_parallel_attention=True,
        **options,
    )
    return plan_node(config, pp_size=pp_size, speculation=config.speculation)


def test_each_rank_holds_whole_sequences_and_its_share_of_the_experts(tmp_path: Path) -> None:
    made = plan(tmp_path, "deepseek-v3", 4, pp_size=2)
    layout = made.layout
    assert (layout.tp_size, layout.dp_size, layout.pp_size, layout.world_size) == (1, 4, 2, 8)
    places = [made.place(rank) for rank in range(8)]
    assert all(place.is_data_parallel and place.tp_size == 4 for place in places)
    assert [(place.pp_rank, place.tp_rank) for place in places] == [(pp, tp) for pp in range(2) for tp in range(4)]
    whole = plan(tmp_path, "deepseek-v3", 2).layout
    assert layout.shards()[0].parts[0].num_heads == whole.shards()[0].parts[0].num_heads == 1
    holdings = node_holdings(made.model_config, layout)
    experts = [each.experts for each in holdings[4:]]
    bounds = [(each[0], each[1]) for each in experts if each is not None]
    assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])]
    assert bounds[-1][1] == experts[0][2] if experts[0] else False
    assert "a token of its own sequences" in holdings[0].describe(layout, 32)


def test_a_sequence_must_fit_one_rank(tmp_path: Path) -> None:
    made = plan(tmp_path, "qwen3-moe", 2)
    num_blocks = made.layout.pool_blocks(10)
    assert num_blocks == 20
    assert fit_memory(made, num_blocks).model.max_model_len == 160


@pytest.mark.parametrize(
    ("model", "ranks", "options", "message"),
    [
        ("llama", 2, {}, "needs a native family with experts, which LlamaForCausalLM is not"),
        ("mixtral", 1, {}, "needs from 2 to 4 ranks, as many as there are experts: --tensor-parallel-size is 1"),
        ("mixtral", 5, {}, "needs from 2 to 4 ranks, as many as there are experts: --tensor-parallel-size is 5"),
        ("mixtral", 2, {"decode_context_parallel": 2}, "does not work with context-parallel ranks"),
        ("deepseek-v3", 2, {"speculate": "mtp"}, "--speculate mtp does not work with --data-parallel-attention"),
        ("mixtral", 2, {"model_impl": "transformers"}, "needs a native family with experts"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, model: str, ranks: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, model, ranks, **options)


def test_up_has_an_option_for_each_role() -> None:
    config = UpConfig(model="m", decode_tp=4, decode_data_parallel_attention=True)
    assert (config.ranks_of("decode"), config.prefill_data_parallel_attention) == (4, False)
