"""A draft head is planned with its model, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.draft_heads import make_mtp
from support.eagle_heads import make_eagle
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig, PrefillConfig
from common.node.holdings import node_holdings
from common.node.plan import NodePlan
from common.node.worker import load_worker
from common.parallel.mesh import SOLO
from decode_node.role import ROLE as DECODE
from prefill_node.role import ROLE as PREFILL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp("glm4-moe", tmp_path_factory.mktemp("mtp") / "model")


def plan(model: Path | str, **options: object) -> NodePlan:
    return DECODE.plan(DecodeConfig(model=str(model), **{"dtype": "float32", "speculate": "mtp", **options}))  # type: ignore[arg-type]


def test_both_roles_cache_the_heads_kv_and_refuse_nodes_that_do_not(model: Path) -> None:
    head = plan(model, kv_cache_dtype="fp8")
    prefill = PREFILL.plan(
        PrefillConfig(model=str(model), dtype="float32", kv_cache_dtype="fp8", speculate="mtp", tensor_parallel_size=2)
    )
    plain = plan(model, kv_cache_dtype="fp8", speculate="suffix")
    assert head.layout.kv_kind == prefill.layout.kv_kind != plain.layout.kv_kind
    assert head.layout.fingerprint == f"{plain.layout.fingerprint}-mtp"
    attention, rows = head.layout.spec.groups
    assert (attention.layers, attention.dtype) == ((0, 1, 2, 3), "float8_e4m3")
    assert (rows.layers, rows.dtype, rows.num_heads) == ((4,), "float32", 1)
    assert plain.layout.spec.num_layers == 3
    [holdings] = node_holdings(head.model_config, head.layout)
    said = holdings.describe(head.layout, 32)
    assert "holds layers 0-2, " in said
    assert " beside the draft head, and " in said


def test_other_methods_do_not_concern_prefill_nodes(model: Path) -> None:
    plain, other = (
        PREFILL.plan(PrefillConfig(model=str(model), dtype="float32", speculate=method))
        for method in ("off", "draft:./none")
    )
    assert (other.layout, other.speculation, other.draft) == (plain.layout, None, None)


def test_a_model_or_ranks_without_a_head_are_refused_in_one_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--speculate mtp: \S+ has no layer for multi-token prediction \("):
        plan("demo")
    with pytest.raises(ConfigError, match="has no layer for multi-token prediction"):
        plan(make_tiny("qwen3", tmp_path / "without"))
    with pytest.raises(ConfigError, match="does not work with pipeline stages"):
        plan(model, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="does not work with pipeline stages"):
        plan(model, pp_layers="1,2")
    with pytest.raises(ConfigError, match="does not work with context parallelism"):
        plan(model, decode_context_parallel=2)
    with pytest.raises(ConfigError, match="not --model-impl transformers"):
        plan(model, model_impl="transformers")


def test_a_checkpoint_whose_config_names_a_layer_that_it_lacks_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("deepseek-v3", tmp_path / "without")
    with pytest.raises(ConfigError, match=r"no weight file holds the tensor model.layers.3.\S+$"):
        load_worker(plan(folder, kv_blocks=4, max_model_len=64), SOLO, small_batches=True)


def test_a_layer_of_another_hidden_size_or_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    for name in ("eh_proj.weight", "shared_head.head.weight"):
        folder = make_mtp("glm4-moe", tmp_path / name)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors[f"model.layers.3.{name}"] = tensors[f"model.layers.3.{name}"][:-1].contiguous()
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=rf"model.layers.3.{name}"):
            load_worker(plan(folder, kv_blocks=4, max_model_len=64), SOLO, small_batches=True)


def test_nodes_with_different_eagle_heads_refuse_each_other(model: Path, tmp_path: Path) -> None:
    one, two = (plan(model, speculate=f"eagle:{make_eagle(model, tmp_path / str(n), seed=n)}") for n in (1, 2))
    again = plan(model, speculate=f'{{"method": "eagle3", "model": "{tmp_path / "1"}"}}')
    assert one.layout.kv_kind == again.layout.kv_kind != two.layout.kv_kind
    attention, head, rows = one.layout.spec.groups
    assert (attention.layers, head.layers, rows.layers) == ((0, 1, 2), (3,), (4,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no EAGLE-3 head"),
        ({"hidden_size": 128}, "the head has a hidden_size of 128, and the model has 64$"),
        ({"vocab_size": 32000}, "the head has a vocab_size of 32000, and the model has 271$"),
        ({"num_hidden_layers": 2}, "of several layers are not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}}, "are not 3 of 3 layers"),
        ({"eagle_config": None}, "eagle_aux_hidden_state_layer_ids is missing, and the model has 3 layers"),
    ],
)
def test_an_eagle_head_of_another_model_is_refused_in_one_sentence(
    changes: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    head = make_eagle(model, tmp_path / "head", **changes)
    with pytest.raises(ConfigError, match=rf"^--speculate eagle:PATH: {head}/config.json: .*{message}"):
        plan(model, speculate=f"eagle:{head}")


def test_an_eagle_head_that_the_ranks_cannot_share_is_refused(model: Path, tmp_path: Path) -> None:
    head = make_eagle(model, tmp_path / "head", num_attention_heads=5, num_key_value_heads=1)
    with pytest.raises(
        ConfigError, match=r"tensor-parallel size 2 does not fit the draft head's 5 query heads; .*\[1\]$"
    ):
        plan(model, speculate=f"eagle:{head}", tensor_parallel_size=2)


def test_a_missing_eagle_head_or_a_vocabulary_that_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--speculate eagle:PATH: model directory /nowhere does not exist$"):
        plan(model, speculate="eagle:/nowhere")
    head = make_eagle(model, tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    for changed, message in (
        ({"d2t": tensors["d2t"] + 1}, "d2t does not name"),
        ({"fc.weight": tensors["fc.weight"][:, :-1].contiguous()}, "fc.weight"),
    ):
        save_file({**tensors, **changed}, head / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            load_worker(plan(model, speculate=f"eagle:{head}", kv_blocks=4, max_model_len=64), SOLO, small_batches=True)
