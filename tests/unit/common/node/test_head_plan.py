"""A draft head is planned with its model, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.draft_heads import make_mtp
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig, PrefillConfig
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
