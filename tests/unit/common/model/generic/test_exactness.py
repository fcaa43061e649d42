"""Models that classes of transformers compute, at the runner: greedy float32 tokens equal those of `generate`."""

from __future__ import annotations

import json
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


def test_layer_types_of_mistral_say_where_its_window_is_as_in_transformers(tmp_path: Path) -> None:
    """MistralForCausalLM applies the window in every layer and ignores `layer_types`; AutoModel loads such a config as Ministral."""
    types = ["full_attention", "sliding_attention", "full_attention"]
    folder = write_model(config_of("mistral"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layer_types": types}))
    prompts = [prompt(length, 250) for length in (17, 100)]
    check(folder, prompts, drive(make_runner(folder, model_impl="transformers"), prompts, 16, 12), 12)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_ropes_that_look_at_the_length_match_transformers_within_their_first_range(rope: str, tmp_path: Path) -> None:
    """Their classes read the positions, which the look at a model without weights does not have."""
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 2048}
    parameters |= {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8} if rope == "longrope" else {}
    config = config_of("mixtral", head_dim=16, max_position_embeddings=2048, rope_parameters=parameters)
    folder, prompts = write_model(config, tmp_path), [prompt(length, 250) for length in (1, 17, 100)]
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
