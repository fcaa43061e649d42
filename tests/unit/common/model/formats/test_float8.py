"""FP8 checkpoints: what every published style means, its parts, and what is wrong with one, in a sentence."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fp8_checkpoints import BLOCK, STYLES, quantise
from support.oracle import TINY, make_tiny
from support.runner_cases import check, drive, make_runner, prompt
from tokenizers import Tokenizer

from common.base.device import CPU
from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.kernels.torch_kernels import TORCH
from common.model.build import Build
from common.model.config import load_model_config
from common.model.fingerprint import fingerprint
from common.model.formats.base import LinearTarget, StoredTensor
from common.model.formats.float8 import Fp8Format, Fp8Linear, Fp8Weight, dequantize, join
from common.model.formats.quantization import Fp8Quantization
from common.model.hub import DEMO_MODEL_PATH
from common.model.loader import load_model
from common.model.precision import Precision
from common.model.tensor_files import Part, TensorFiles
from common.model.weights import CheckpointWeights
from common.node.plan import plan_node
from scripts.demo_model.samples import SAMPLES, prompt_text

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("plain")
    return {name: make_tiny(name, root / name) for name in ("llama-biases", "qwen3")}


@pytest.fixture(scope="module")
def blocked(originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return quantise(originals["llama-biases"], STYLES["fp8 blocks"], tmp_path_factory.mktemp("blocked"))


def weights_of(folder: Path) -> CheckpointWeights:
    return CheckpointWeights(folder, load_model_config(folder).quantization)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_tokens_are_those_of_the_same_weights_in_float32(
    originals: dict[str, Path], tmp_path: Path, style: str, name: str
) -> None:
    """The oracle runs the dequantized weights; the tolerance is that of any float32 checkpoint."""
    fp8, plain = quantise(originals[name], STYLES[style], tmp_path)
    prompts = [prompt(n, TINY[name].vocab_size) for n in (1, 17, 60)]
    check(plain, prompts, drive(make_runner(fp8), prompts, 16, 12), 12)


@pytest.mark.parametrize("part", [None, Part(0, 5, 41), Part(1, 50, 101), Part(0, 32, 64), Part(1, 0, 48)])
@pytest.mark.parametrize("style", STYLES)
def test_a_part_is_dequantized_by_its_own_scales(
    originals: dict[str, Path], tmp_path: Path, style: str, part: Part | None
) -> None:
    fp8, plain = quantise(originals["llama-biases"], STYLES[style], tmp_path)
    whole = weights_of(plain).read(NAME, (64, 112), torch.float32)
    expected = whole if part is None else whole.narrow(part.dim, part.lo, part.hi - part.lo)
    assert torch.equal(weights_of(fp8).read(NAME, (64, 112), torch.float32, part), expected)
    assert torch.equal(weights_of(fp8).read(NAME, (64, 112), torch.bfloat16, part), expected.bfloat16())


def _weight(generator: torch.Generator, rows: int, columns: int, blocked: bool) -> Fp8Weight:
    scale = torch.rand((rows // 128, columns // 128) if blocked else (rows, 1), generator=generator) + 0.5
    return Fp8Weight(torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn), scale, blocked)


def test_products_of_e4m3_rows_are_those_of_the_dequantized_weights() -> None:
    """Within what e4m3 keeps of the activations: an error of a 16th of each at most, averaged over 256 of them."""
    generator = torch.Generator().manual_seed(3)
    weight = join([_weight(generator, rows, 256, blocked=False) for rows in (48, 16)])
    assert weight is not None
    bias = torch.randn(64, generator=generator).bfloat16()
    x = torch.randn(7, 256, generator=generator).bfloat16() * torch.logspace(-3, 3, 7)[:, None].bfloat16()
    out = Fp8Linear(weight, bias).forward(x)
    assert out.dtype == torch.bfloat16
    expected = x.float() @ weight.dequantized().t()
    error = (out.float() - bias.float() - expected).norm(dim=1) / expected.norm(dim=1)
    # Of the smallest row only the bias is left in bfloat16.
    assert error[2:].max() < 0.05


def test_matrices_that_cannot_be_multiplied_as_one_are_not_joined() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, blocks = (_weight(generator, 128, 128, blocked) for blocked in (False, True))
    assert join([rows, blocks]) is None
    assert join([_weight(generator, 24, 128, blocked=False)]) is None
    joined = join([blocks, _weight(generator, 256, 128, blocked=True)])
    assert joined is not None
    assert joined.scale.shape == (3, 1)
    assert torch.equal(joined.dequantized()[:128], blocks.dequantized())


def test_blocks_of_128_are_read_as_they_are_stored_unless_a_rank_cuts_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    stored = _weight(generator, 256, 384, blocked=True)
    save_file({"a.weight": stored.values, "a.weight_scale_inv": stored.scale}, tmp_path / "model.safetensors")
    fp8 = Fp8Format(TensorFiles(tmp_path), CPU, Fp8Quantization((128, 128)))
    for part, scale in (
        (None, stored.scale),
        (Part(0, 128, 256), stored.scale[1:]),
        (Part(1, 128, 384), stored.scale[:, 1:]),
    ):
        found = fp8.read_packed(StoredTensor("a.weight", (256, 384), part))
        assert found is not None
        assert found.is_blocked
        assert torch.equal(found.scale, scale)
        assert torch.equal(found.dequantized(), fp8.read(StoredTensor("a.weight", (256, 384), part), torch.float32))
    assert fp8.read_packed(StoredTensor("a.weight", (256, 384), Part(0, 64, 192))) is None


def test_a_single_column_of_blocks_is_not_taken_for_scales_of_rows(tmp_path: Path) -> None:
    stored = _weight(torch.Generator().manual_seed(4), 256, 128, blocked=True)
    save_file({"a.weight": stored.values, "a.weight_scale_inv": stored.scale}, tmp_path / "model.safetensors")
    fp8 = Fp8Format(TensorFiles(tmp_path), CPU, Fp8Quantization((128, 128)))
    whole = StoredTensor("a.weight", (256, 128))
    found = fp8.read_packed(whole)
    assert found is not None
    assert found.is_blocked
    assert torch.equal(found.dequantized(), fp8.read(whole, torch.float32))


@pytest.mark.parametrize("style", ["fp8 tensor", "compressed channel"])
def test_kept_weights_give_each_rank_the_rows_and_columns_that_are_its_own(
    originals: dict[str, Path], tmp_path: Path, style: str
) -> None:
    fp8, plain = quantise(originals["llama-biases"], STYLES[style], tmp_path)
    whole = weights_of(plain).read(NAME, (64, 112), torch.float32)
    packed = Fp8Format(TensorFiles(fp8), CPU, Fp8Quantization())
    for part in (None, Part(0, 16, 48), Part(1, 32, 96)):
        found = packed.read_packed(StoredTensor(NAME, (64, 112), part))
        assert found is not None
        expected = whole if part is None else whole.narrow(part.dim, part.lo, part.hi - part.lo)
        assert torch.equal(found.dequantized(), expected)
    assert packed.holds(NAME)
    assert not Fp8Format(TensorFiles(plain), CPU, Fp8Quantization()).holds(NAME)


def test_a_model_on_kept_weights_answers_like_the_dequantized_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, by PyTorch's CPU product of e4m3 rows: activations in e4m3 too."""
    fp8, _ = quantise(DEMO_MODEL_PATH, STYLES["compressed channel"], tmp_path)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt_text(sample), add_special_tokens=False).ids for sample in SAMPLES]
    dequantized = drive(make_runner(fp8, "bfloat16"), prompts, 64, 1)
    monkeypatch.setattr("common.model.formats.float8.can_multiply", lambda device, blocked: not blocked)
    kept = drive(make_runner(fp8, "bfloat16"), prompts, 64, 1)
    output = StoredTensor("model.layers.0.self_attn.o_proj.weight", (256, 256))
    assert isinstance(
        weights_of(fp8).linear([output], None, LinearTarget(Precision.choose("bfloat16", small_batches=True), TORCH)),
        Fp8Linear,
    )
    assert [s.generated for s in kept] == [s.generated for s in dequantized]
    errors = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(kept, dequantized, strict=True)]
    print(f"largest change of a log-probability {max(errors):.3f}")
    assert 0 < max(errors) < 0.5


def test_kv_scales_come_from_the_checkpoint_one_pair_for_each_layer_of_the_rank(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    scaled, _ = quantise(originals["llama-biases"], STYLES["compressed tensor"], tmp_path / "a", kv_scales=(0.25, 0.5))
    plain, _ = quantise(originals["llama-biases"], STYLES["compressed tensor"], tmp_path / "b")
    for folder, pair in ((scaled, (0.25, 0.5)), (plain, (1.0, 1.0))):
        config = load_model_config(folder)
        build = Build(config, weights_of(folder), Precision.choose("float32", small_batches=True))
        assert [
            build.kv_scales(f"model.layers.{i}.self_attn", config.layers[i].attention.planes) for i in range(3)
        ] == [pair] * 3
    model = load_model(
        scaled, load_model_config(scaled), dtype="float32", load_format="auto", seed=0, small_batches=True
    )
    assert model.kv_scales == ((0.25, 0.5),) * 3


def test_the_fingerprint_tells_fp8_from_its_dequantized_twin_and_sees_a_changed_scale(
    blocked: tuple[Path, Path], tmp_path: Path
) -> None:
    fp8, plain = blocked
    changed = Path(shutil.copytree(fp8, tmp_path / "changed"))
    tensors = load_file(changed / "model.safetensors")
    tensors[f"{NAME}_scale_inv"][-1, -1] *= 1.01
    save_file(tensors, changed / "model.safetensors")
    found = {fingerprint(path, load_model_config(path), "auto", "float32", 0) for path in (fp8, plain, changed)}
    assert len(found) == 3


def test_a_missing_or_misshapen_scale_is_named(blocked: tuple[Path, Path], tmp_path: Path) -> None:
    fp8 = Path(shutil.copytree(blocked[0], tmp_path / "broken"))
    file = fp8 / "model.safetensors"
    tensors = load_file(file)
    scale = tensors.pop(f"{NAME}_scale_inv")
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"tensor {NAME} is FP8, and no weight file holds its scale"):
        weights_of(fp8).read(NAME, (64, 112), torch.float32)
    save_file({**tensors, f"{NAME}_scale_inv": scale[:, :1].contiguous()}, file)
    with pytest.raises(ConfigError, match=r"has shape \[2, 1\], which fits neither the matrix \[64, 112\]"):
        weights_of(fp8).read(NAME, (64, 112), torch.float32)
    save_file({**tensors, f"{NAME}_scale_inv": scale}, file)
    with pytest.raises(ConfigError, match="no quantization_config"):
        CheckpointWeights(fp8).read(NAME, (64, 112), torch.float32)


def test_dequantizing_takes_every_number_times_the_scale_of_its_block() -> None:
    values = torch.ones(70, 100).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 10.0).view(3, 3)
    wide = dequantize(values, scale, BLOCK, (0, 0))
    assert wide[0, 0] == 1.0
    assert wide[31, 47] == 1.0
    assert wide[31, 48] == 2.0
    assert wide[32, 99] == 6.0
    assert wide[69, 99] == 9.0
    assert math.isclose(float(wide.sum()), sum(float(scale[r // 32, c // 48]) for r in range(70) for c in range(100)))


def test_asking_for_fp8_refuses_a_checkpoint_that_is_not() -> None:
    with pytest.raises(ConfigError, match=r"--quantization fp8: .*config\.json does not mention FP8 weights"):
        plan_node(DecodeConfig(model="demo", quantization="fp8"))
