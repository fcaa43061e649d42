"""The runner against `transformers`: every family, chunk size, prompt length and mix of sequences."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import LONGROPE, OF_ANY_LENGTH, TINY, greedy, make_tiny
from support.runner_cases import check, drive, make_runner, prompt

from common.base.errors import EngineError
from common.engine.step import StepInput
from common.kernels.native.find import find_native
from common.model.native_layer import _log_once  # pyright: ignore[reportPrivateUsage]

LATER = (
    *("phi3", "granite", "smollm3", "olmo2", "starcoder2", "gpt2", "opt", "gemma2", "gemma3", "gemma3-vision"),
    *("qwen2-window", "qwen2.5-vl", "qwen2-yarn", "qwen3-moe", "mixtral", "gpt-oss", "glm4-moe", "granite-moe"),
    *("deepseek-v2", "deepseek-v2-groups", "deepseek-v3"),
)
"""Families that share the code of the others' steps: by default with one chunk size."""
CASES = [
    pytest.param(name, chunk, marks=[pytest.mark.thorough] if name in LATER and chunk != 16 else [])
    for chunk in (16, 64, 10**6)
    for name in OF_ANY_LENGTH
]


@pytest.fixture(scope="module")
def tiny_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: make_tiny(name, root / name) for name in TINY}


@pytest.mark.parametrize(("name", "chunk"), CASES)
def test_a_mixed_batch_matches_transformers(tiny_dirs: dict[str, Path], name: str, chunk: int) -> None:
    vocab = TINY[name].vocab_size
    prompts = [prompt(n, vocab) for n in (1, 15, 16, 17, 100)]
    check(tiny_dirs[name], prompts, drive(make_runner(tiny_dirs[name]), prompts, chunk))


@pytest.mark.parametrize("name", ["mqa", "gemma2", "gemma3-vision", "opt", "gpt2"])
def test_names_of_tensors_may_lack_the_part_that_stands_for_a_class_without_lm_head(
    tiny_dirs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(tiny_dirs[name], tmp_path / name))
    tensors = load_file(folder / "model.safetensors")
    save_file({key.partition(".")[2]: tensor for key, tensor in tensors.items()}, folder / "model.safetensors")
    prompts = [prompt(17, TINY[name].vocab_size)]
    check(tiny_dirs[name], prompts, drive(make_runner(folder), prompts, 16, 4), 4)


@pytest.mark.skipif(find_native() is None, reason="no native kernels")
@pytest.mark.parametrize(("name", "is_whole"), [("mistral", True), ("qwen2-window", True), ("gemma2", False)])
def test_layers_with_windows_on_the_native_kernels_match_transformers(
    tiny_dirs: dict[str, Path], name: str, is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        runner = make_runner(tiny_dirs[name], chooses_attention=True)
    assert ("run part by part" in caplog.text) != is_whole
    prompts = [prompt(n, TINY[name].vocab_size) for n in (1, 15, 16, 17, 100, 300)]
    check(tiny_dirs[name], prompts, drive(runner, prompts, 64, 12), 12)


@pytest.mark.parametrize(("reach", "lengths"), [(2048, (33, 48, 100)), (32, (1, 15, 16, 17, 20))])
def test_longrope_has_the_factors_of_the_longest_context_served(
    tiny_dirs: dict[str, Path], reach: int, lengths: tuple[int, ...]
) -> None:
    prompts = [prompt(n, TINY[LONGROPE].vocab_size) for n in lengths]
    runner = make_runner(tiny_dirs[LONGROPE], max_model_len=reach)
    check(tiny_dirs[LONGROPE], prompts, drive(runner, prompts, 16, 12), 12)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_prefill_of_one_token_a_step_matches_transformers(tiny_dirs: dict[str, Path], name: str) -> None:
    prompts = [prompt(n, TINY[name].vocab_size) for n in (1, 17, 100)]
    check(tiny_dirs[name], prompts, drive(make_runner(tiny_dirs[name]), prompts, 1))


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("chunk", [64, 10**6])
def test_a_long_prompt_beside_short_ones_matches_transformers(
    tiny_dirs: dict[str, Path], name: str, chunk: int
) -> None:
    prompts = [prompt(n, TINY[name].vocab_size) for n in (1000, 5, 300, 16)]
    check(tiny_dirs[name], prompts, drive(make_runner(tiny_dirs[name]), prompts, chunk, 12), 12)


def test_every_layers_kv_is_final_when_it_is_announced(tiny_dirs: dict[str, Path]) -> None:
    """A transfer may read layer i's blocks from the moment `on_layer(i)` is called."""
    runner = make_runner(tiny_dirs["qwen3"])
    storage = runner._attention._data  # pyright: ignore
    seen: list[tuple[int, torch.Tensor]] = []
    slots = list(range(32, 52))
    step = StepInput(1, list(range(20)), list(range(20)), [slots], [20], [20], [[[2, 3]]])
    runner.execute(step, lambda i: seen.append((i, storage[i].clone())))
    assert [i for i, _ in seen] == [0, 1, 2]
    assert all(torch.equal(copy, storage[i]) for i, copy in seen)
    assert not torch.equal(storage[2, 0, 2], torch.full_like(storage[2, 0, 2], 1e4))


def test_a_step_that_does_not_fit_together_fails_alone(tiny_dirs: dict[str, Path]) -> None:
    runner = make_runner(tiny_dirs["llama"])
    with pytest.raises(EngineError, match="step 7"):
        runner.execute(StepInput(7, [10**6], [0], [[16]], [1], [1], [[[1]]]))
    prompts = [prompt(17, 250)]
    check(tiny_dirs["llama"], prompts, drive(runner, prompts, 16))


def test_bfloat16_stays_near_float32(tiny_dirs: dict[str, Path]) -> None:
    """Whatever dtype a step computes in on this machine, single rows and wide batches agree with the exact logits."""
    prompts = [prompt(33, 250)]
    expected = greedy(tiny_dirs["llama"], prompts[0], 4)
    for chunk in (1, 64):
        (sequence,) = drive(make_runner(tiny_dirs["llama"], "bfloat16"), prompts, chunk, 1)
        assert sequence.logprobs[0] == pytest.approx(expected.logprobs[0], abs=0.3)
