"""AWQ, GPTQ and compressed-tensors checkpoints: what each means, on one rank and on several; and broken ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import TINY, make_tiny
from support.quantized_checkpoints import STYLES, quantize
from support.runner_cases import check, drive, make_runner, prompt
from torch import Tensor

from common.base.errors import ConfigError
from common.kernels.torch_kernels import TORCH
from common.model.build import Build
from common.model.config import load_model_config
from common.model.formats import group_format, groupwise
from common.model.formats.base import Linear, LinearTarget, StoredTensor
from common.model.formats.group_format import ReorderedLinear, unpack_words
from common.model.formats.groupwise import GroupLinear, GroupWeight
from common.model.loader import load_model
from common.model.precision import Precision
from common.model.tensor_files import Part
from common.model.weights import CheckpointWeights
from common.parallel.mesh import Mesh
from common.parallel.place import RankPlace

EXACT = [name for name, style in STYLES.items() if style.is_exact]
DOWN = "model.layers.1.mlp.down_proj"
FLOAT32 = Precision.choose("float32", small_batches=True)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("plain")
    return {name: make_tiny(name, root / name) for name in ("llama-biases", "qwen3")}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in groups, as where kernels multiply them."""

    def make(weight: GroupWeight, bias: Tensor | None, target: LinearTarget) -> Linear:
        return GroupLinear(weight, bias)

    monkeypatch.setattr(group_format, "make_group_linear", make)


def weights_of(folder: Path) -> CheckpointWeights:
    return CheckpointWeights(folder, load_model_config(folder).quantization)


def build_of(folder: Path, tp_rank: int = 0, tp_size: int = 1) -> Build:
    mesh = Mesh(RankPlace(tp_rank, tp_size))
    return Build(load_model_config(folder), weights_of(folder), FLOAT32, mesh)


@pytest.mark.parametrize("style", EXACT)
def test_tokens_are_those_of_the_same_weights_in_float32(
    originals: dict[str, Path], tmp_path: Path, style: str
) -> None:
    quantized, plain = quantize(originals["llama-biases"], STYLES[style], tmp_path)
    prompts = [prompt(n, TINY["llama-biases"].vocab_size) for n in (1, 17, 60)]
    check(plain, prompts, drive(make_runner(quantized), prompts, 16, 12), 12)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("style", ["awq", "gptq desc_act", "packed asymmetric"])
def test_tokens_of_weights_kept_in_groups_are_the_same(originals: dict[str, Path], tmp_path: Path, style: str) -> None:
    quantized, plain = quantize(originals["qwen3"], STYLES[style], tmp_path)
    prompts = [prompt(n, TINY["qwen3"].vocab_size) for n in (1, 17, 60)]
    check(plain, prompts, drive(make_runner(quantized), prompts, 16, 12), 12)


@pytest.mark.parametrize("part", [None, Part(0, 5, 41), Part(1, 50, 101)])
@pytest.mark.parametrize("style", STYLES)
def test_a_part_is_read_with_its_own_scales(
    originals: dict[str, Path], tmp_path: Path, style: str, part: Part | None
) -> None:
    quantized, plain = quantize(originals["llama-biases"], STYLES[style], tmp_path)
    found, expected = (
        weights_of(folder).read(f"{DOWN}.weight", (64, 112), torch.float32, part) for folder in (quantized, plain)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert found.is_contiguous()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("style", EXACT)
@torch.inference_mode()
def test_two_ranks_shares_make_the_whole_layer(originals: dict[str, Path], tmp_path: Path, style: str) -> None:
    """Rank 0 has inputs 0 to 56 of the down projection: groups of 16 are split into groups of 8."""
    quantized, plain = quantize(originals["llama-biases"], STYLES[style], tmp_path)
    whole = build_of(plain)
    hidden, mlp = whole.config.hidden_size, whole.config.layers[0].mlp
    x, inner_x = torch.randn(3, hidden), torch.randn(3, mlp.inner_size)
    names = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")]
    columns, rows = [], []
    for rank in range(2):
        build = build_of(quantized, rank, 2)
        own = build.inner(mlp)
        columns.append(build.column_linear(names, [own, own], hidden, bias=True).forward(x).chunk(2, 1))
        rows.append(build.row_linear(DOWN, own, hidden, bias=True).forward(inner_x[:, own.lo : own.hi].contiguous()))
    share = whole.inner(mlp)
    expected = whole.column_linear(names, [share, share], hidden, bias=True).forward(x)
    joined = torch.cat([torch.cat(each, 1) for each in zip(*columns, strict=True)], 1)
    torch.testing.assert_close(joined, expected, atol=1e-4, rtol=1e-4)
    expected = whole.row_linear(DOWN, share, hidden, bias=True).forward(inner_x)
    torch.testing.assert_close(rows[0] + rows[1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("style", "merged", "down"),
    [
        ("awq", GroupLinear, GroupLinear),
        ("gptq desc_act", ReorderedLinear, ReorderedLinear),
        ("gptq desc_act of each layer", None, ReorderedLinear),
    ],
)
def test_layers_stay_in_groups_where_their_orders_agree(
    originals: dict[str, Path], tmp_path: Path, style: str, merged: type | None, down: type
) -> None:
    weights = weights_of(quantize(originals["llama-biases"], STYLES[style], tmp_path)[0])
    pair = [StoredTensor(f"model.layers.0.mlp.{name}_proj.weight", (112, 64)) for name in ("gate", "up")]
    target = LinearTarget(FLOAT32, TORCH)
    found = weights.linear(pair, None, target)
    assert found is None if merged is None else isinstance(found, merged)
    assert isinstance(weights.linear([StoredTensor(f"{DOWN}.weight", (64, 112))], None, target), down)


@pytest.mark.parametrize("style", ["gptq", "gptq v2", "gptq 8 bit"])
def test_zeros_of_groups_without_negative_weights_are_read(
    originals: dict[str, Path], tmp_path: Path, style: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(originals["llama-biases"], source)
    tensors = load_file(source / "model.safetensors")
    tensors[f"{DOWN}.weight"][::3] = tensors[f"{DOWN}.weight"][::3].abs()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    found, expected = (
        weights_of(folder).read(f"{DOWN}.weight", (64, 112), torch.float32)
        for folder in quantize(source, STYLES[style], tmp_path)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("filled_with", [0, -1])
def test_a_list_of_groups_that_was_never_filled_counts_as_none(
    originals: dict[str, Path], tmp_path: Path, filled_with: int
) -> None:
    """As in exllama, AutoGPTQ and compressed-tensors: with zeros, all inputs had the scales of the first group."""
    quantized, plain = quantize(originals["llama-biases"], STYLES["gptq"], tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    _replace("g_idx", lambda t: torch.full_like(t, filled_with))(tensors)
    save_file(tensors, quantized / "model.safetensors")
    found, expected = (
        weights_of(folder).read(f"{DOWN}.weight", (64, 112), torch.float32) for folder in (quantized, plain)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("kept")
def test_a_rank_that_has_all_inputs_keeps_reordered_weights_in_groups(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    quantized, _ = quantize(originals["llama-biases"], STYLES["gptq desc_act"], tmp_path)
    for tp_size, kept in ((1, True), (2, False)):
        build = build_of(quantized, 0, tp_size)
        layer = build.row_linear(DOWN, build.inner(build.config.layers[0].mlp), 64, bias=False)
        assert isinstance(layer, ReorderedLinear) == kept


def test_a_rank_that_would_split_less_than_eight_inputs_is_refused(originals: dict[str, Path], tmp_path: Path) -> None:
    quantized, _ = quantize(originals["llama-biases"], STYLES["awq"], tmp_path)
    build = build_of(quantized, 0, 4)
    with pytest.raises(ConfigError, match=rf"tensor {DOWN}\.weight cannot be split over 4 tensor-parallel ranks"):
        build.row_linear(DOWN, build.inner(build.config.layers[0].mlp), 64, bias=False)


def test_words_are_unpacked_from_their_lowest_bits() -> None:
    words = torch.tensor([[0x76543210, -1]], dtype=torch.int32)
    assert unpack_words(words, 4).tolist() == [[*range(8), *[15] * 8]]
    assert unpack_words(words, 8).tolist() == [[0x10, 0x32, 0x54, 0x76, *[255] * 4]]


def _drop(last: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"{DOWN}.{last}")


def _replace(last: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    name = f"{DOWN}.{last}"
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("style", "breaks", "says"),
    [
        ("awq", _drop("scales"), r"no weight file holds the tensor .*down_proj\.scales"),
        ("awq", _drop("qzeros"), r"no weight file holds the tensor .*down_proj\.qzeros"),
        ("awq", _drop("qweight"), r"no weight file holds the tensor .*down_proj\.weight"),
        ("awq", _replace("scales", lambda t: t[:3]), r"down_proj\.scales has shape \[3, 64\].*implies \[7, 64\]"),
        ("awq", _replace("qweight", lambda t: t.float()), r"down_proj\.qweight is torch\.float32, not torch\.int32"),
        ("awq", _replace("scales", lambda t: t / 0), "the scales of .*down_proj are not finite"),
        ("gptq", _drop("scales"), r"no weight file holds the tensor .*down_proj\.scales"),
        ("gptq", _replace("qweight", lambda t: t[1:]), r"down_proj\.qweight has shape \[13, 64\].*implies \[14, 64\]"),
        ("gptq", _replace("g_idx", lambda t: t + 1), r"down_proj\.g_idx names groups beyond the 7"),
        ("gptq", _replace("g_idx", lambda t: t[1:]), r"down_proj\.g_idx has shape \[111\]"),
        ("packed groups", _drop("weight_scale"), r"no weight file holds the tensor .*down_proj\.weight_scale"),
        ("packed groups", _replace("weight_packed", lambda t: t[:, 1:]), r"weight_packed has shape \[64, 13\]"),
        ("packed asymmetric", _drop("weight_zero_point"), r"holds the tensor .*down_proj\.weight_zero_point"),
        ("int8 channel", _drop("weight_scale"), r"no weight file holds the tensor .*down_proj\.weight_scale"),
        ("int8 channel", _replace("weight_scale", lambda t: t[1:]), r"weight_scale has 63 numbers, not one for the"),
        ("int8 channel", _replace("weight", lambda t: t[1:]), r"down_proj\.weight has shape \[63, 112\]"),
    ],
)
def test_a_broken_checkpoint_is_one_sentence(
    originals: dict[str, Path], tmp_path: Path, style: str, breaks: Callable[[dict[str, Tensor]], None], says: str
) -> None:
    quantized, _ = quantize(originals["llama-biases"], STYLES[style], tmp_path)
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    breaks(tensors)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=says) as caught:
        load_model(
            quantized, load_model_config(quantized), dtype="auto", load_format="auto", seed=0, small_batches=True
        )
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("style", ["awq", "gptq", "packed groups", "int8 channel"])
def test_a_truncated_checkpoint_is_one_sentence(originals: dict[str, Path], tmp_path: Path, style: str) -> None:
    quantized, _ = quantize(originals["llama-biases"], STYLES[style], tmp_path)
    file = quantized / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is truncated"):
        weights_of(quantized)


def test_groups_that_do_not_divide_a_matrix_are_refused(originals: dict[str, Path], tmp_path: Path) -> None:
    quantized, _ = quantize(originals["llama-biases"], STYLES["awq"], tmp_path)
    file = quantized / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization_config"]["group_size"] = 128
    file.write_text(json.dumps(raw))
    with pytest.raises(
        ConfigError, match=r"down_proj has 64 outputs and 112 inputs, which do not divide into groups of 128"
    ):
        weights_of(quantized).read(f"{DOWN}.weight", (64, 112), torch.float32)


def test_layers_that_a_checkpoint_leaves_unquantized_stay_floats(originals: dict[str, Path], tmp_path: Path) -> None:
    quantized, plain = quantize(originals["llama-biases"], STYLES["awq"], tmp_path)
    tensors = {
        name: tensor
        for name, tensor in load_file(quantized / "model.safetensors").items()
        if not name.startswith(f"{DOWN}.q") and name != f"{DOWN}.scales"
    }
    tensors[f"{DOWN}.weight"] = load_file(plain / "model.safetensors")[f"{DOWN}.weight"]
    save_file(tensors, quantized / "model.safetensors")
    weights, target = weights_of(quantized), LinearTarget(FLOAT32, TORCH)
    assert weights.linear([StoredTensor(f"{DOWN}.weight", (64, 112))], None, target) is None
    assert weights.linear([StoredTensor(f"{DOWN[:-9]}up_proj.weight", (112, 64))], None, target) is not None
    found = weights.read(f"{DOWN}.weight", (64, 112), torch.float32)
    assert torch.equal(found, tensors[f"{DOWN}.weight"])


def test_weights_that_nothing_multiplies_here_are_dequantized_and_the_log_says_so(
    originals: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = quantize(originals["llama-biases"], STYLES["gptq"], tmp_path)
    groupwise._log_dequantized.cache_clear()
    target = LinearTarget(FLOAT32, TORCH)
    with caplog.at_level("INFO"):
        layer = weights_of(quantized).linear([StoredTensor(f"{DOWN}.weight", (64, 112))], None, target)
    assert not isinstance(layer, GroupLinear)
    assert "int4 weights are dequantized to float32 while loading" in caplog.text
