"""Models that classes of transformers compute, at the runner: greedy float32 tokens equal those of `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.generic_models import KINDS, config_of
from support.oracle import write_model
from support.runner_cases import check, drive, make_runner, prompt

from common.engine.step import StepInput

DEFAULT = ("llama", "gpt2", "deepseek_v3", "gemma3_text")
"""Together: rotary and learned positions, merged [in, out] weights, experts, padded values, windows, soft-capped logits."""
CASES = [pytest.param(kind, marks=[] if kind in DEFAULT else pytest.mark.thorough) for kind in KINDS]


@pytest.mark.parametrize("kind", CASES)
def test_a_mixed_batch_matches_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_model(config_of(kind), tmp_path)
    prompts = [prompt(length, 250) for length in (1, 15, 16, 17, 100)]
    check(folder, prompts, drive(make_runner(folder, model_impl="transformers"), prompts, 16, 12), 12)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["glm", "mixtral", "opt"])
def test_long_prompts_beside_short_ones_match_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_model(config_of(kind), tmp_path)
    prompts = [prompt(length, 250) for length in (1000, 5, 300, 16)]
    check(folder, prompts, drive(make_runner(folder, model_impl="transformers"), prompts, 64, 12), 12)


def test_every_layers_kv_is_final_when_it_is_announced(tmp_path: Path) -> None:
    runner = make_runner(write_model(config_of("llama"), tmp_path), model_impl="transformers")
    storage = runner._attention._data  # pyright: ignore
    seen: list[tuple[int, torch.Tensor]] = []
    step = StepInput(1, list(range(20)), list(range(20)), [list(range(32, 52))], [20], [20], [[[2, 3]]])
    runner.execute(step, lambda i: seen.append((i, storage[i].clone())))
    assert [i for i, _ in seen] == [0, 1, 2]
    assert all(torch.equal(copy, storage[i]) for i, copy in seen)
