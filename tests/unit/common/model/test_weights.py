"""Loading: shards, seeds, parts, and one clear sentence for every way in which files can be broken."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.fingerprint import fingerprint
from common.model.formats.floating import FloatLinear
from common.model.loader import load_model
from common.model.precision import Precision, can_pack
from common.model.tensor_files import Part
from common.model.weights import CheckpointWeights, DummyWeights


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    for name in ("llama", "qwen3"):
        make_tiny(name, root / name)
    return root


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    """A copy of the one-file model, to break."""
    return Path(shutil.copytree(originals / "llama", tmp_path / "model"))


@pytest.fixture
def sharded(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "qwen3", tmp_path / "model"))


def load(path: Path) -> DecoderModel:
    return load_model(path, load_model_config(path), dtype="auto", load_format="auto", seed=0, small_batches=True)


def identity(path: Path, load_format: str = "auto", dtype: str = "float32", seed: int = 0) -> str:
    return fingerprint(path, load_model_config(path), load_format, dtype, seed)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"holds the tensor lm_head\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(ConfigError, match=r"model\.safetensors.*model\.norm\.weight has shape \[65\].*\[64\]"):
        load(folder)


def test_a_quantized_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is torch\.int8"):
        load(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 4) + b"{{{{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 10) + b'{"a": {} }',
    ],
)
def test_a_file_that_is_not_safetensors_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    for use in (load, identity):
        with pytest.raises(ConfigError, match=r"model\.safetensors") as caught:
            use(folder)
        assert "\n" not in caught.value.message


def test_a_truncated_file_is_refused_before_anything_is_loaded(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="truncated"):
        load(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00008.safetensors").unlink()
    for use in (load, identity):
        with pytest.raises(ConfigError, match="model-00002-of-00008"):
            use(sharded)


def test_an_index_cannot_lead_out_of_the_directory(sharded: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"x": torch.ones(1)}, outside)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    with pytest.raises(ConfigError):
        load(sharded)


def test_bin_weights_get_a_hint(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"\.bin weights are not supported"):
        load(folder)


def test_a_rank_can_read_its_part_of_a_tensor(originals: Path) -> None:
    name, shape = "model.layers.0.mlp.down_proj.weight", (64, 112)
    for source in (CheckpointWeights(originals / "llama"), DummyWeights(3)):
        whole = source.read(name, shape, torch.float32)
        for part in (Part(0, 16, 32), Part(1, 0, 56)):
            expected = whole.narrow(part.dim, part.lo, part.hi - part.lo)
            got = source.read(name, shape, torch.float32, part)
            assert torch.equal(got, expected)
            assert got.is_contiguous()


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    first, again = DummyWeights(1), DummyWeights(1)
    again.read("other.weight", (8, 8), torch.float32)
    a = first.read("a.weight", (64, 32), torch.bfloat16)
    assert torch.equal(a, again.read("a.weight", (64, 32), torch.bfloat16))
    assert not torch.equal(a, first.read("b.weight", (64, 32), torch.bfloat16))
    assert not torch.equal(a, DummyWeights(2).read("a.weight", (64, 32), torch.bfloat16))
    assert a.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first.read("norm.weight", (8,), torch.float32), torch.ones(8))


def test_fingerprint_is_of_the_weights_not_of_their_place(folder: Path, originals: Path) -> None:
    assert identity(folder) == identity(originals / "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert identity(folder) == identity(originals / "llama")


def test_fingerprint_sees_every_tensor_the_config_the_dtype_and_the_tokenizer(folder: Path) -> None:
    seen = {
        identity(folder),
        identity(folder, dtype="bfloat16"),
        identity(folder, "dummy"),
        identity(folder, "dummy", seed=1),
    }
    for name in ("model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        rewrite(folder, lambda tensors, name=name: tensors[name].mul_(1.001))
        seen.add(identity(folder))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-5}))
    seen.add(identity(folder))
    (folder / "tokenizer.json").write_text("{}")
    seen.add(identity(folder))
    (folder / "tokenizer.json").write_text("{ }")
    seen.add(identity(folder))
    assert len(seen) == 10


@pytest.mark.parametrize("small_batches", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_bf16_products_are_the_bf16_weights_products(rows: int, small_batches: bool) -> None:
    """Whichever copy of the weights a batch uses on this machine, packed or not, plain or biased."""
    precision = Precision.choose("bfloat16", small_batches=small_batches)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for shape in ((64, 48), (512, 320)):
            weight = torch.randn(shape, generator=generator).bfloat16()
            bias = torch.randn(shape[0], generator=generator).bfloat16()
            x = torch.randn(rows, shape[1], generator=generator).bfloat16()
            out = FloatLinear(weight, bias, precision).forward(x.to(precision.for_rows(rows)))
            expected = x.double() @ weight.double().T + bias.double()
            torch.testing.assert_close(out.double(), expected, atol=0.2, rtol=0.01)


def test_prepacking_is_used_where_this_torch_has_it() -> None:
    """A silent fall-back would cost a factor of two in decode speed."""
    if torch.backends.mkldnn.is_available():
        assert can_pack(torch.float32)
