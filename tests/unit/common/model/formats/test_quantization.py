"""What `quantization_config` may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.formats.quantization import AwqQuantization, GptqQuantization, parse_quantization


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
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "AWQ gemv in 4 bits"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "AWQ llm-awq in 4 bits"),
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
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "stored as marlin in 4 bits"),
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


@pytest.mark.parametrize(
    ("named", "zero_offset"),
    [
        ({}, 1),
        ({"format": "gptq_v2"}, 0),
        ({"checkpoint_format": None, "format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
    ],
)
def test_the_layout_of_gptq_is_under_its_newer_or_its_older_key(named: dict[str, Any], zero_offset: int) -> None:
    found = parse_quantization({"quant_method": "gptq", "bits": 4, "group_size": 128, **named})
    assert found == GptqQuantization(128, 4, zero_offset)


@pytest.mark.parametrize("named", [{}, {"version": "GEMM"}, {"format": "gemm", "backend": "auto"}])
def test_awq_without_a_layout_is_gemm(named: dict[str, Any]) -> None:
    found = parse_quantization({"quant_method": "awq", "bits": 4, "group_size": 128, **named})
    assert found == AwqQuantization(128)
