"""Experts in MXFP4, as gpt-oss is published, against the same weights in float32; what is wrong with them is one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.mxfp4_checkpoints import pack_experts
from support.oracle import make_tiny
from support.runner_cases import check, drive, make_runner, prompt
from support.tiny_models import TINY
from torch import Tensor

from common.base.errors import ConfigError
from common.kernels.native.find import find_native
from common.kernels.native.kernels import NativeKernels
from common.kernels.native.linear import NativeLinear
from common.model.build import Build
from common.model.config import load_model_config
from common.model.description import MixtureDescription
from common.model.mixture.experts import ExpertLoop
from common.model.precision import FLOAT32
from common.model.weights import CheckpointWeights


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """gpt-oss in MXFP4, and the same weights in float32."""
    root = tmp_path_factory.mktemp("mxfp4")
    config = TINY["gpt-oss"].config
    with pytest.MonkeyPatch.context() as patch:  # inputs in whole groups
        patch.setattr(config, "intermediate_size", 64)
        plain = make_tiny("gpt-oss", root / "plain")
    return pack_experts(plain, root / "packed"), plain


def test_tokens_are_those_of_the_same_weights_in_float32(checkpoints: tuple[Path, Path]) -> None:
    packed, plain = checkpoints
    prompts = [prompt(n, TINY["gpt-oss"].vocab_size) for n in (1, 17, 60)]
    check(plain, prompts, drive(make_runner(packed), prompts, 16, 12), 12)


@pytest.mark.skipif(find_native() is None, reason="no native kernels")
def test_the_native_kernels_hold_each_weight_in_4_bits(checkpoints: tuple[Path, Path]) -> None:
    config = load_model_config(checkpoints[0])
    (mixture,) = {layer.mlp for layer in config.layers}
    native = find_native()
    assert native is not None
    assert isinstance(mixture, MixtureDescription)
    weights = CheckpointWeights(checkpoints[0], config.quantization)
    loop = ExpertLoop(Build(config, weights, FLOAT32, kernels=NativeKernels(native)), "model.layers.0.", mixture)
    for linear, count in [(loop.gate_ups[5], 2 * 64 * 64), (loop.downs[5], 64 * 64)]:
        assert isinstance(linear, NativeLinear)
        assert linear.packed.weight.nbytes == count / 2


SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda scales: scales[:, :-1], r"down_proj_scales has shape \[6, 63, 2\], config.json implies \[6, 64, 2\]"),
        (lambda scales: scales.float(), r"down_proj_scales is torch.float32, not torch.uint8"),
        (lambda scales: torch.full_like(scales, 255), r"down_proj_scales holds scales that are not numbers"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    checkpoints: tuple[Path, Path], tmp_path: Path, spoil: Callable[[Tensor], Tensor], says: str
) -> None:
    folder = Path(shutil.copytree(checkpoints[0], tmp_path / "spoilt"))
    tensors = load_file(folder / "model.safetensors")
    tensors[SCALES] = spoil(tensors[SCALES]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=says):
        make_runner(folder)
