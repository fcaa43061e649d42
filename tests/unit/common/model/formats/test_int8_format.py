"""compressed-tensors' int8 checkpoints, multiplied by int8 activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.perplexity import perplexity
from support.quantized_checkpoints import STYLES, quantize

from common.kernels.torch_kernels import TORCH
from common.model.config import load_model_config
from common.model.formats.base import LinearTarget, StoredTensor
from common.model.formats.int8 import Int8Linear, Int8Weight
from common.model.hub import DEMO_MODEL_PATH
from common.model.precision import Precision
from common.model.tensor_files import Part
from common.model.weights import CheckpointWeights

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("style", ["int8 channel", "int8 tensor"])
@torch.inference_mode()
def test_ranks_multiply_their_own_rows_and_columns(tmp_path: Path, style: str) -> None:
    quantized, plain = quantize(DEMO_MODEL_PATH, STYLES[style], tmp_path)
    weights = CheckpointWeights(quantized, load_model_config(quantized).quantization)
    target = LinearTarget(Precision.choose("float32", small_batches=True), TORCH)
    for stored in (StoredTensor(UP, (640, 256), Part(0, 100, 420)), StoredTensor(DOWN, (256, 640), Part(1, 100, 420))):
        layer = weights.linear([stored], None, target)
        assert isinstance(layer, Int8Linear)
        expected = CheckpointWeights(plain).read(stored.name, stored.shape, torch.float32, stored.part)
        torch.testing.assert_close(Int8Weight(layer._columns.t(), layer._scale).dequantized(), expected)
        x = torch.randn(5, expected.size(1), generator=torch.Generator().manual_seed(0))
        error = layer.forward(x) - x @ expected.t()
        assert error.norm() / (x @ expected.t()).norm() < 0.02


@pytest.mark.thorough
def test_perplexity_of_an_int8_checkpoint_stays_within_one_percent(tmp_path: Path) -> None:
    quantized, _ = quantize(DEMO_MODEL_PATH, STYLES["int8 channel"], tmp_path)
    assert perplexity(quantized) < 1.01 * perplexity(DEMO_MODEL_PATH)
