"""GGUF files mean what transformers computes with the same weights, on one rank and on several."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.gguf_families import FAMILIES, make_family, vocab_size
from support.gguf_files import Kind, gguf_name, write_gguf
from support.oracle import LONGROPE, TINY, make_tiny
from support.perplexity import perplexity
from support.runner_cases import check, drive, make_runner, prompt
from torch import Tensor

from common.base.errors import ConfigError
from common.kernels.torch_kernels import TORCH
from common.model.build import Build
from common.model.config import load_model_config
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.groupwise import GroupLinear, GroupWeight
from common.model.gguf import weights as gguf_weights
from common.model.gguf.file import open_gguf
from common.model.gguf.weights import GgufWeights
from common.model.hub import DEMO_MODEL_PATH
from common.model.precision import Precision
from common.model.tensor_files import Part
from common.model.weights import CheckpointWeights
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace

FLOAT32 = Precision.choose("float32", small_batches=True)


def weights_of(file: Path) -> GgufWeights:
    return GgufWeights(open_gguf(file), load_model_config(file).layers[0].attention)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in groups, as where kernels multiply them."""

    def make(weight: GroupWeight, bias: Tensor | None, target: LinearTarget) -> Linear:
        return GroupLinear(weight, bias)

    monkeypatch.setattr(gguf_weights, "make_group_linear", make)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama3", kind) for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)),
        *zip(FAMILIES, itertools.cycle((Kind.F16, Kind.Q8_0, Kind.F32, Kind.Q4_1, Kind.BF16))),
    ],
)
def test_tokens_are_those_of_the_same_weights_in_float32(tmp_path: Path, name: str, kind: Kind) -> None:
    folder = make_family(name, tmp_path / "original")
    # Rows that blocks of 32 do not divide stay numbers.
    file, plain = write_gguf(folder, tmp_path, lambda name, weight: Kind.F16 if weight.size(-1) % 32 else kind)
    # One set of factors serves all contexts of a node; transformers chooses by the length of each.
    lengths = (33, 60) if name == LONGROPE else (1, 17, 60)
    prompts = [prompt(n, vocab_size(name)) for n in lengths]
    check(plain, prompts, drive(make_runner(file), prompts, 16, 12), 12)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("name", "kind", "dense"),
    [
        ("qwen3-moe", Kind.Q8_0, 1),
        ("mixtral", Kind.Q4_0, 0),
        ("gpt-oss", Kind.Q8_0, 0),
        ("gpt-oss", Kind.MXFP4, 0),
        ("glm4-moe", Kind.Q4_1, 1),
        ("granite-moe", Kind.Q8_0, 0),
    ],
)
def test_experts_are_read_from_tensors_of_all_experts(tmp_path: Path, name: str, kind: Kind, dense: int) -> None:
    """Files say nothing of Mixtral's sliding window of 40 tokens."""
    folder = make_tiny(name, tmp_path / "original")
    file, plain = write_gguf(folder, tmp_path, lambda name, weight: Kind.F16 if weight.size(1) % 32 else kind)
    assert [layer.mlp.kind for layer in load_model_config(file).layers].count("gated") == dense
    prompts = [prompt(n, TINY[name].vocab_size) for n in (1, 17)]
    check(plain, prompts, drive(make_runner(file), prompts, 16, 12), 12)


def mixed(name: str, weight: Tensor) -> Kind:
    """Roughly Q4_K_M: some matrices in Q6_K and Q5_K; rows that 256 does not divide in another format."""
    if weight.size(1) % 256:
        return Kind.Q8_0
    if "k_proj" in name:
        return Kind.Q5_K
    return Kind.Q6_K if "v_proj" in name or "embed" in name else Kind.Q4_K


@pytest.mark.parametrize("part", [None, Part(0, 32, 64), Part(1, 64, 192)])
def test_every_tensor_of_a_mixed_file_is_read_whole_and_in_parts(tmp_path: Path, part: Part | None) -> None:
    file, plain = write_gguf(DEMO_MODEL_PATH, tmp_path, mixed)
    expected = CheckpointWeights(plain)
    found, target = weights_of(file), LinearTarget(FLOAT32, TORCH)
    for module, shape in (
        ("model.layers.1.self_attn.q_proj", (256, 256)),
        ("model.layers.1.self_attn.k_proj", (128, 256)),
        ("model.layers.1.self_attn.v_proj", (128, 256)),
        ("model.layers.1.mlp.down_proj", (256, 640)),
        ("model.embed_tokens", (2048, 256)),
    ):
        name = f"{module}.weight"
        stored = StoredTensor(gguf_name(name), shape, part)
        weight = expected.read(name, shape, torch.float32, part)
        torch.testing.assert_close(found.read(stored.name, shape, torch.float32, part), weight)
        layer = found.linear([stored], None, target)
        assert (layer is None) == (mixed(name, torch.empty(shape)) in (Kind.Q5_K, Kind.Q6_K))
        if layer is not None:
            x = torch.randn(3, weight.size(1))
            torch.testing.assert_close(layer.forward(x), x @ weight.t(), atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_two_ranks_shares_make_the_whole_layer(tmp_path: Path) -> None:
    file, plain = write_gguf(DEMO_MODEL_PATH, tmp_path, lambda name, weight: Kind.Q4_0)
    config = load_model_config(file)
    whole = Build(load_model_config(plain), CheckpointWeights(plain), FLOAT32)
    x, inner_x = torch.randn(3, 256), torch.randn(3, 640)
    share = whole.inner(config.layers[0].mlp)
    ups, downs = [], []
    for rank in range(2):
        build = Build(config, weights_of(file), FLOAT32, Mesh(RankPlace(rank, 2)))
        own = build.inner(config.layers[0].mlp)
        ups.append(build.column_linear(["blk.0.ffn_up"], [own], 256, bias=False).forward(x))
        part = inner_x[:, own.lo : own.hi].contiguous()
        downs.append(build.row_linear("blk.0.ffn_down", own, 256, bias=False).forward(part))
    expected = whole.column_linear(["model.layers.0.mlp.up_proj"], [share], 256, bias=False).forward(x)
    torch.testing.assert_close(torch.cat(ups, 1), expected, atol=1e-4, rtol=1e-4)
    expected = whole.row_linear("model.layers.0.mlp.down_proj", share, 256, bias=False).forward(inner_x)
    torch.testing.assert_close(downs[0] + downs[1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "limit"), [(Kind.Q8_0, 1.01), (Kind.Q4_0, 1.04)])
def test_perplexity_of_the_demo_model_stays_near_that_of_its_bf16_weights(
    tmp_path: Path, kind: Kind, limit: float
) -> None:
    file, _ = write_gguf(DEMO_MODEL_PATH, tmp_path, lambda name, weight: kind)
    assert perplexity(file) < limit * perplexity(DEMO_MODEL_PATH)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    file, _ = write_gguf(DEMO_MODEL_PATH, tmp_path, lambda name, weight: Kind.F16)
    weights = weights_of(file)
    with pytest.raises(ConfigError, match=r"model\.gguf holds no tensor blk\.9\.attn_q\.weight"):
        weights.read("blk.9.attn_q.weight", (256, 256), torch.float32)
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight has shape \[256, 256\].*implies \[256, 128\]"):
        weights.linear([StoredTensor("blk.0.attn_q.weight", (256, 128))], None, LinearTarget(FLOAT32, TORCH))
