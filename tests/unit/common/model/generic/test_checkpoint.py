"""Weights that transformers' classes name and merge in other ways than files do, and files that lack some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.generic_models import config_of
from support.oracle import write_model
from support.runner_cases import drive, make_runner, prompt
from transformers import AutoModelForCausalLM

from common.base.errors import ConfigError
from common.model.generic.checkpoint import GenericCheckpoint
from common.model.generic.model import build_class
from common.model.tensor_files import Part


def test_experts_are_merged_from_tensors_of_each(tmp_path: Path) -> None:
    folder = write_model(config_of("mixtral"), tmp_path)
    stored = load_file(folder / "model.safetensors")
    model = build_class(folder, torch.float32)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shape = tuple(model.get_parameter(name).shape)
    checkpoint = GenericCheckpoint(folder, model)
    assert name not in stored
    whole = checkpoint.read(name, shape, torch.float32)
    first = stored["model.layers.1.block_sparse_moe.experts.0.w1.weight"]
    assert torch.equal(whole[0, : first.size(0)], first)
    assert torch.equal(checkpoint.read(name, shape, torch.float32, Part(0, 1, 3)), whole[1:3])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_model(config_of("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        make_runner(folder, model_impl="transformers")


@pytest.mark.parametrize("kind", ["deepseek_v3", "dots1", "flint", "glm"])
def test_what_a_class_keeps_in_float32_stays_in_it_beside_bfloat16(kind: str, tmp_path: Path) -> None:
    """Biases that choose DeepSeek's experts were rounded, and others chosen."""
    folder = write_model(config_of(kind), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    ours = build_class(folder, torch.bfloat16).state_dict()
    assert {name: tensor.dtype for name, tensor in ours.items()} == {n: tensor.dtype for n, tensor in theirs.items()}
    runner = make_runner(folder, model_impl="transformers", dtype="bfloat16")
    [sequence] = drive(runner, [prompt(20, 250)], 16, 4)
    assert len(sequence.generated) == 4


def test_int8_weights_are_made_while_loading(tmp_path: Path) -> None:
    folder = write_model(config_of("glm"), tmp_path)
    runner = make_runner(folder, model_impl="transformers", quantization="int8")
    [sequence] = drive(runner, [prompt(20, 250)], 16, 4)
    assert len(sequence.generated) == 4


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_that_need_scales_are_refused_by_name(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    # As files of ModelOpt, whose config.json may say nothing of quantization.
    folder = write_model(config_of(kind), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.startswith("model.layers.1.") and tensors[name].dim() == 2)
    tensors[name] = tensors[name].mul(8).to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        make_runner(folder, model_impl="transformers")
