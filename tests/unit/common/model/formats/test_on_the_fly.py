"""`--quantization int8` and `int4`: the same weights for any number of ranks, what they cost in perplexity, and
which nodes fit together."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from support.oracle import make_tiny
from support.perplexity import perplexity

from common.base.errors import ConfigError, HandshakeRefused
from common.config.option_groups import Quantization
from common.config.service_configs import DecodeConfig, PrefillConfig
from common.kernels.torch_kernels import TORCH
from common.kv.rank_layout import check_compatible
from common.model.build import Build
from common.model.config import load_model_config
from common.model.formats.base import LinearTarget, StoredTensor
from common.model.formats.floating import FloatLinear
from common.model.formats.int8 import Int8Linear
from common.model.formats.on_the_fly import WeightBits, quantize_linear
from common.model.hub import DEMO_MODEL_PATH
from common.model.precision import Precision
from common.model.weights import CheckpointWeights, DummyWeights
from common.node.plan import plan_node
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace

FLOAT32 = Precision.choose("float32", small_batches=True)


def build_of(quantize: WeightBits | None, tp_rank: int = 0, tp_size: int = 1) -> Build:
    mesh = Mesh(RankPlace(tp_rank, tp_size))
    config = load_model_config(DEMO_MODEL_PATH)
    return Build(config, CheckpointWeights(DEMO_MODEL_PATH), FLOAT32, mesh, quantize=quantize)


@pytest.mark.parametrize(("quantize", "tolerance"), [("int8", 0.02), ("int4", 1e-4)])
@torch.inference_mode()
def test_ranks_shares_make_the_layer_that_one_rank_has(quantize: WeightBits, tolerance: float) -> None:
    """Of int8, each rank rounds its own part of the activations."""
    whole, ranks = build_of(quantize), [build_of(quantize, rank, 4) for rank in range(4)]
    hidden, mlp = whole.config.hidden_size, whole.config.layers[0].mlp
    generator = torch.Generator().manual_seed(0)
    x, inner_x = (torch.randn(3, size, generator=generator) for size in (hidden, mlp.inner_size))
    up, down = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
    shares = [(build, build.inner(mlp)) for build in ranks]
    columns = [build.column_linear([up], [own], hidden, bias=False).forward(x) for build, own in shares]
    expected = whole.column_linear([up], [whole.inner(mlp)], hidden, bias=False).forward(x)
    torch.testing.assert_close(torch.cat(columns, 1), expected, atol=1e-4, rtol=1e-4)
    rows = [
        build.row_linear(down, own, hidden, bias=False).forward(inner_x[:, own.lo : own.hi]) for build, own in shares
    ]
    expected = whole.row_linear(down, whole.inner(mlp), hidden, bias=False).forward(inner_x)
    total = torch.stack(rows).sum(0)
    assert float((total - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 1.01), ("int4", 1.04)])
def test_perplexity_of_the_demo_model_stays_near_that_of_its_bf16_weights(
    quantization: Quantization, limit: float
) -> None:
    own, found = perplexity(DEMO_MODEL_PATH), perplexity(DEMO_MODEL_PATH, quantization=quantization)
    print(f"perplexity {found:.4f} with {quantization}, {own:.4f} in bfloat16: {100 * (found / own - 1):+.2f} %")
    assert found != own
    assert found < limit * own


def test_the_lm_head_becomes_int8_and_layers_of_odd_width_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode():
        build = build_of("int4")
        assert isinstance(build.lm_head_linear("lm_head.weight", torch.randn(32, 256)), Int8Linear)
        assert isinstance(build_of(None).lm_head_linear("lm_head.weight", torch.randn(32, 256)), FloatLinear)
        source = DummyWeights(0)
        with caplog.at_level(logging.INFO):
            layer = quantize_linear(
                "int4",
                [StoredTensor("a.weight", (8, 100))],
                lambda stored: source.read(stored.name, stored.shape, torch.float32),
                None,
                LinearTarget(FLOAT32, TORCH),
            )
    assert isinstance(layer, Int8Linear)
    assert "layers of 100 inputs become int8" in caplog.text


def test_nodes_that_quantize_differently_refuse_each_other_by_name() -> None:
    plain, int8, int4 = (
        plan_node(DecodeConfig(model="demo", quantization=kind)).layout for kind in ("auto", "int8", "int4")
    )
    check_compatible(plan_node(PrefillConfig(model="demo", quantization="int8")).layout, int8)
    for src, dst, says in (
        (plain, int8, "decode node has '[0-9a-f]{32}-int8'"),
        (int4, int8, "has '[0-9a-f]{32}-int4'"),
    ):
        with pytest.raises(HandshakeRefused, match=says):
            check_compatible(src, dst)
    assert len({layout.kv_kind for layout in (plain, int8, int4)}) == 3


def test_a_checkpoint_that_is_quantized_already_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny("llama", tmp_path / "model")
    file = path / "config.json"
    file.write_text(file.read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    with pytest.raises(
        ConfigError, match=r"--quantization int4 needs floating-point weights, and .* is quantized already"
    ):
        plan_node(DecodeConfig(model=str(path), quantization="int4"))
    with pytest.raises(ConfigError, match="--quantization fp8"):
        plan_node(dataclasses.replace(DecodeConfig(model="demo"), quantization="fp8"))
