"""bfloat16 models whose products and attention are by tiles of matrix units, real or emulated, against `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.native_variants import TILES, native
from support.oracle import TINY, greedy, make_tiny
from support.runner_cases import drive, make_runner, prompt

from common.base.variables import CPU_KERNELS
from common.config.option_groups import Quantization

CASES: list[tuple[str, str, Quantization, float]] = [
    ("llama", "bfloat16", "auto", 0.3),
    ("qwen3", "bfloat16", "auto", 0.3),
    ("gemma2", "bfloat16", "auto", 0.3),
    ("qwen2-window", "float8_e4m3", "auto", 0.6),
    ("qwen2", "bfloat16", "int8", 0.6),
]


@pytest.mark.parametrize("variant", TILES)
@pytest.mark.parametrize(("name", "kv_dtype", "quantization", "tolerance"), CASES)
def test_log_probabilities_are_near_float32_and_the_same_in_any_batch(
    variant: str,
    name: str,
    kv_dtype: str,
    quantization: Quantization,
    tolerance: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native(variant)
    monkeypatch.setenv(CPU_KERNELS, variant)
    folder = make_tiny(name, tmp_path / name)
    prompts = [prompt(n, TINY[name].vocab_size) for n in (1, 15, 33, 200)]

    def answers(prompts: list[list[int]], chunk: int) -> list[tuple[list[int], list[float]]]:
        runner = make_runner(folder, "bfloat16", kv_dtype, quantization=quantization, chooses_attention=True)
        return [(each.generated, each.logprobs) for each in drive(runner, prompts, chunk, 8)]

    together = answers(prompts, 10**6)
    assert answers(prompts, 16) == together
    assert answers(prompts[3:], 70) == together[3:]
    for tokens, (_, logprobs) in zip(prompts, together, strict=True):
        expected = greedy(folder, tokens, 1).logprobs[0]
        assert logprobs[0] == pytest.approx(expected, abs=tolerance)
