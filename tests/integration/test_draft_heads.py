"""Guesses by heads of a model (multi-token prediction, EAGLE-3): the same tokens as without, and as many right as a slow
reference has."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.draft_heads import SlowMtp, always_right, make_mtp, small_vocabulary
from support.eagle_heads import SlowEagle, make_eagle
from support.guessed_answers import KINDS, SEED, Recorded, answers, slow_acceptance
from support.oracle import save_spaced_tokenizer
from support.tiny_models import TINY

from common.model.packed_weights import PackedWeights
from common.node import worker
from kvrelay import LLM, SamplingParams

MODELS = ["glm4-moe", "deepseek-v3"]
PROMPT = random.Random(2).choices(range(131, 250), k=75)


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models whose MTP layer is right now and then."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_mtp(name, tmp_path_factory.mktemp("mtp") / name)
            save_spaced_tokenizer(made[name], TINY[name].vocab_size)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def plain(mtp_folder: Callable[[str], Path]) -> dict[str, list[Any]]:
    return answers("off", PROMPT, model=str(mtp_folder("glm4-moe")))[0]


VARIANTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "asynchronous": {"async_scheduling": True},
    "preempted": {"kv_blocks": 32},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_on_equals_off(variant: str, mtp_folder: Callable[[str], Path], plain: dict[str, list[Any]]) -> None:
    guessed, counts = answers("mtp", PROMPT, model=str(mtp_folder("glm4-moe")), **VARIANTS[variant])
    drafted, accepted = counts["mtp"]
    assert drafted > accepted > 20
    assert counts["grammar"][1] > 0
    for kind, expected in plain.items():
        assert [each[:2] for each in guessed[kind]] == [each[:2] for each in expected], kind


def test_on_equals_off_with_an_eagle_head(
    mtp_folder: Callable[[str], Path], plain: dict[str, list[Any]], tmp_path: Path
) -> None:
    """It knows four fifths of the vocabulary; the grammars' characters are among the others."""
    target = mtp_folder("glm4-moe")
    head = make_eagle(target, tmp_path / "head", norm_before_residual=True)
    guessed, counts = answers(f"eagle:{head}", PROMPT, model=str(target))
    drafted, accepted = counts["eagle3"]
    assert drafted > accepted > 20
    for kind, expected in plain.items():
        assert [each[:2] for each in guessed[kind]] == [each[:2] for each in expected], kind


def test_as_many_guesses_of_an_eagle_head_are_right_as_with_a_slow_reference(tmp_path: Path) -> None:
    """It knows the first guess of a step, as far as noise and its smaller vocabulary allow."""
    target = make_mtp(small_vocabulary("glm4-moe"), tmp_path / "model", always_right(4, by_hidden=True))
    head = make_eagle(target, tmp_path / "head")
    slow, prompt = SlowEagle(target, head), [n % 57 + 3 for n in PROMPT]
    for temperature in (0.0, 0.7):
        kinds = {"any": {"temperature": temperature, "ignore_eos": True, "max_tokens": 60}}
        guessed, counts = answers(f"eagle:{head}", prompt, kinds, model=str(target), speculate_tokens=2)
        [(tokens, _, _)] = guessed["any"]
        drafted, accepted = counts["eagle3"]
        guess = partial(slow.guesses, temperature=temperature, seed=SEED)
        drafts, right = slow_acceptance(guess, prompt, list(tokens), 2)
        assert 0.1 < right / drafts < 0.95, "neither always nor never right"
        assert accepted / drafted == pytest.approx(right / drafts, abs=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_as_many_guesses_are_right_as_with_a_slow_reference(name: str, mtp_folder: Callable[[str], Path]) -> None:
    model = mtp_folder(name)
    kinds = {str(t): {"temperature": t, "ignore_eos": True, "max_tokens": 60} for t in (0.0, 0.7)}
    plain, _ = answers("off", PROMPT, kinds, model=str(model))
    slow = SlowMtp(model)
    for kind, options in kinds.items():
        guessed, counts = answers("mtp", PROMPT, {kind: options}, model=str(model), speculate_tokens=3)
        [(tokens, _, _)] = guessed[kind]
        assert tokens == plain[kind][0][0]
        drafted, accepted = counts["mtp"]
        guess = partial(slow.guesses, temperature=options["temperature"], seed=SEED)
        drafts, right = slow_acceptance(guess, PROMPT, list(tokens), 3)
        assert 0.1 < right / drafts < 0.95, "neither always nor never right"
        assert accepted / drafted == pytest.approx(right / drafts, abs=0.03)


def test_an_eagle_heads_packed_weights_are_not_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have an LM head of one name and shape; processes on one host share what they pack."""
    packed = PackedWeights(tmp_path / "weights", "model", 1.0)
    monkeypatch.setattr(worker, "open_packed_weights", lambda *_: packed)
    target = make_mtp(small_vocabulary("glm4-moe"), tmp_path / "model", always_right(5, by_hidden=True))
    head = make_eagle(target, tmp_path / "head", by_hidden=True)
    kinds = {"greedy": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20}}
    prompt = [n % 57 + 3 for n in PROMPT]
    _, counts = answers(f"eagle:{head}", prompt, kinds, model=str(target), speculate_tokens=1)
    assert counts["eagle3"][0] == counts["eagle3"][1] > 5


def test_the_kv_of_wrong_guesses_is_in_no_cached_block(mtp_folder: Callable[[str], Path]) -> None:
    """A prompt whose blocks another answer has left, with many wrong guesses: as many are right as where nothing was cached."""
    model = mtp_folder("glm4-moe")
    params = {"temperature": 0.0, "ignore_eos": True, "seed": SEED}
    recorded = Recorded()
    with recorded.recording():
        llm = LLM(str(model), dtype="float32", kv_memory_gb=0.1, speculate="mtp", speculate_tokens=3)
    with llm:
        [first] = llm.generate([PROMPT], SamplingParams(**params, max_tokens=60), use_tqdm=False)
        before = replace(recorded.made.counts["mtp"])
        prompt = PROMPT + list(first.outputs[0].token_ids)[:50]
        [second] = llm.generate([prompt], SamplingParams(**params, max_tokens=60), use_tqdm=False)
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens > len(PROMPT)
    counts = recorded.made.counts["mtp"]
    guess = partial(SlowMtp(model).guesses, temperature=0.0, seed=SEED)
    drafts, right = slow_acceptance(guess, prompt, list(second.outputs[0].token_ids), 3)
    assert (counts.drafted - before.drafted, counts.accepted - before.accepted) == (drafts, right)


@pytest.mark.parametrize("by_hidden", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_knows_is_always_right(name: str, by_hidden: bool, tmp_path: Path) -> None:
    """Prompts of other lengths put its first row elsewhere in a block."""
    model = make_mtp(small_vocabulary(name), tmp_path / name, always_right(4, by_hidden=by_hidden))
    for length in (1, 16, 17):
        kinds = {"greedy": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}}
        _, counts = answers("mtp", [n % 57 + 3 for n in PROMPT[:length]], kinds, model=str(model))
        assert counts["mtp"][0] == counts["mtp"][1] > 30


def test_kv_in_float8_changes_the_models_tokens_only(mtp_folder: Callable[[str], Path]) -> None:
    """The hidden rows stay in the model's dtype."""
    model, kinds = str(mtp_folder("glm4-moe")), {name: KINDS[name] for name in ("greedy", "sampled")}
    plain, _ = answers("off", PROMPT, kinds, model=model, kv_cache_dtype="fp8")
    guessed, counts = answers("mtp", PROMPT, kinds, model=model, kv_cache_dtype="fp8")
    assert guessed == plain
    assert counts["mtp"][1] > 10


def test_a_draft_model_guesses_for_a_model_whose_kv_is_in_float8() -> None:
    """The draft's own KV is in the dtype of its weights, so that it need not draw what the target draws."""
    prompt = PROMPT[:40]
    kinds = {name: {**KINDS[name], "ignore_eos": True} for name in ("greedy", "sampled")}
    plain, _ = answers("off", prompt, kinds, kv_cache_dtype="fp8")
    guessed, counts = answers("draft:demo", prompt, kinds, kv_cache_dtype="fp8")
    assert guessed == plain
    drafted, accepted = counts["draft"]
    assert drafted >= accepted > 0.8 * drafted > 50
