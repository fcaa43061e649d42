"""Reading tensors: parts, seeds, and one clear sentence for each tensor that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.decoder import DecoderModel
from common.model.loader import load_model
from common.model.tensor_files import Part
from common.model.weights import CheckpointWeights, DummyWeights


def load(path: Path) -> DecoderModel:
    return load_model(path, load_model_config(path), dtype="auto", load_format="auto", seed=0, small_batches=True)


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
