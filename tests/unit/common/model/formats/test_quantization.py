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
        (
            {"quant_method": "bitsandbytes"},
            "quantized by 'bitsandbytes'; supported: fp8, awq, gptq, compressed-tensors",
        ),
        ({"quant_method": "awq"}, "AWQ gemm in None bits; supported: gemm in 4 bits"),
        ({"quant_method": "awq", "bits": 8}, "AWQ gemm in 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ gemv in 4 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 7}, "group_size is 7, not -1 or a multiple of 8"),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 128},
            "gptq in 3 bits; supported: gptq or gptq_v2 in 4 or 8",
        ),
        ({"quant_method": "gptq", "bits": 4.0, "group_size": 128}, r"gptq in 4\.0 bits"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": "4", "type": "int", "strategy": "channel"}}},
            },
            "quantized as int'4' by channel",
        ),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "stored as marlin in 4 bits"),
        ({"quant_method": "gptq", "bits": 4}, "group_size is None"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "settings of their own for some layers"),
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
