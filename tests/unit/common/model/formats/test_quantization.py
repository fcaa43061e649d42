"""What `quantization_config` may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import ConfigError
from common.model.config import load_model_config


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "awq"}, "quantized by 'awq'; supported: fp8, compressed-tensors"),
        ({}, "quantized by None"),
        ([], "is not an object"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "stored as FP8 e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "not two positive numbers"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "quantized as int4 by None",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {}}}, "says nothing about weights"),
    ],
)
def test_other_quantizations_are_refused_in_one_sentence(
    originals: Path, tmp_path: Path, quantization: Any, says: str
) -> None:
    raw = json.loads((originals / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    with pytest.raises(ConfigError, match=says) as caught:
        load_model_config(tmp_path)
    assert "\n" not in caught.value.message
