"""The demo model with guesses and without: the same tokens and log-probabilities, whatever a request asks for."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.guessed_answers import SEED, answers, slow_acceptance, slow_draw
from support.oracle import oracle_model
from tokenizers import Tokenizer

from common.model.hub import DEMO_MODEL_PATH

TEXT = "The quick brown fox jumps over the lazy dog, and the quick brown fox sleeps. "
PROMPT_IDS: list[int] = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json")).encode(TEXT * 3).ids


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Any]]:
    return answers("off", PROMPT_IDS)[0]


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_on_equals_off(method: str, plain: dict[str, list[Any]]) -> None:
    guessed, counts = answers(method, PROMPT_IDS)
    drafted, accepted = counts[method]
    assert drafted > accepted > 50
    assert counts["grammar"][1] > 0
    for kind, expected in plain.items():
        for (tokens, reason, logprobs), (ours, our_reason, our_logprobs) in zip(expected, guessed[kind], strict=True):
            assert (ours, our_reason) == (tokens, reason), kind
            for row, our_row in zip(logprobs, our_logprobs, strict=True):
                assert our_row == pytest.approx(row, abs=1e-4), kind


def test_a_draft_that_is_the_target_is_always_right(plain: dict[str, list[Any]]) -> None:
    """Whatever the rules of a draw are, the draft follows them too. KV in float8 changes the target's tokens only."""
    guessed, counts = answers("draft:demo", PROMPT_IDS)
    drafted, accepted = counts["draft"]
    assert drafted == accepted > 300
    for kind, expected in plain.items():
        assert [each[:2] for each in guessed[kind]] == [each[:2] for each in expected], kind


@pytest.fixture(scope="module")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with noise on its weights."""
    folder = tmp_path_factory.mktemp("draft") / "noisy"
    shutil.copytree(DEMO_MODEL_PATH, folder)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    noisy = {
        name: each + 0.1 * each.float().std() * torch.randn(each.shape, generator=generator).to(each.dtype)
        for name, each in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder


def reference_guesses(folder: Path, ids: list[int], most: int, temperature: float) -> list[int]:
    """What a draft model guesses after `ids`, by transformers and without a KV cache."""
    model = oracle_model(str(folder))
    guesses: list[int] = []
    for _ in range(most):
        known = [*ids, *guesses]
        with torch.inference_mode():
            logits = model(torch.tensor([known])).logits[0, -1].numpy()
        guesses.append(slow_draw(logits, temperature, SEED, len(known)))
    return guesses


def test_as_many_drafts_are_right_as_with_a_slow_reference(other_draft: Path) -> None:
    kinds = {str(t): {"temperature": t, "ignore_eos": True, "max_tokens": 60} for t in (0.0, 1.0)}
    plain, _ = answers("off", PROMPT_IDS, kinds)
    for name, kind in kinds.items():
        guessed, counts = answers(f"draft:{other_draft}", PROMPT_IDS, {name: kind}, speculate_tokens=4)
        [(tokens, _, _)] = guessed[name]
        assert tokens == plain[name][0][0]
        drafted, accepted = counts["draft"]
        guess = partial(reference_guesses, other_draft, temperature=kind["temperature"])
        drafts, right = slow_acceptance(guess, PROMPT_IDS, list(tokens), 4)
        assert 0.1 < right / drafts < 0.95, "neither always nor never right"
        assert accepted / drafted == pytest.approx(right / drafts, abs=0.03)
