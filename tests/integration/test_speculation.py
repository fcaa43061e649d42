"""The demo model with guesses and without: the same tokens and log-probabilities, whatever a request asks for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import oracle_model
from tokenizers import Tokenizer

from common.engine.drafting import Drafting
from common.engine.sampling.gumbel import gumbel_argmax, noise_key
from common.model.hub import DEMO_MODEL_PATH
from common.node import parts
from common.node.parts import make_drafting
from common.node.plan import NodePlan
from common.node.worker import Worker
from kvrelay import LLM, SamplingParams

TEXT = "The quick brown fox jumps over the lazy dog, and the quick brown fox sleeps. "
PROMPT_IDS: list[int] = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json")).encode(TEXT * 3).ids
SCHEMA = {
    "type": "object",
    "properties": {
        "cities": {
            "type": "array",
            "items": {"enum": ["Paris", "Rome", "Paris and Rome"]},
            "minItems": 4,
            "maxItems": 9,
        },
        "same": {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 4, "maxItems": 9},
    },
    "required": ["cities", "same"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "samples": {"temperature": 0.7, "n": 3},
    "log-probabilities": {"temperature": 0.0, "logprobs": 3},
    "stops": {"temperature": 0.0, "stop": ["fox sleeps"], "min_tokens": 20},
    "bad words": {"temperature": 0.0, "bad_words": ["quick", " lazy dog"]},
    "JSON": {"temperature": 0.0, "structured_outputs": {"json": SCHEMA}},
    "JSON, sampled": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}, "logprobs": 1},
}


class Recorded:
    """Makes what drafts on a node, and keeps it."""

    made: Drafting

    def __call__(self, plan: NodePlan, draft: Worker | None = None) -> Drafting:
        self.made = make_drafting(plan, draft)
        self.made._always = draft is not None  # however slow a test's draft model is
        return self.made


def answers(
    speculate: str, kinds: dict[str, dict[str, Any]] = KINDS, **options: Any
) -> tuple[dict[str, list[Any]], dict[str, tuple[int, int]]]:
    """For each kind the tokens and log-probabilities of its answers, all computed together; and the counts of guesses."""
    params = [SamplingParams(**{"max_tokens": 60, "seed": 5, **kind}) for kind in kinds.values()]
    recorded = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "make_drafting", recorded)
        llm = LLM("demo", dtype="float32", kv_memory_gb=0.1, speculate=speculate, max_model_len=512, **options)
    with llm:
        outputs = llm.generate([PROMPT_IDS] * len(params), params, use_tqdm=False)
    counts = {method: (count.drafted, count.accepted) for method, count in recorded.made.counts.items()}
    found: dict[str, list[Any]] = {}
    for kind, output in zip(kinds, outputs, strict=True):
        found[kind] = [
            (
                answer.token_ids,
                answer.finish_reason,
                [{t: each.logprob for t, each in row.items()} for row in answer.logprobs or ()],
            )
            for answer in output.outputs
        ]
    return found, counts


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Any]]:
    return answers("off")[0]


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_on_equals_off(method: str, plain: dict[str, list[Any]]) -> None:
    guessed, counts = answers(method)
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
    guessed, counts = answers("draft:demo")
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


def reference_acceptance(
    folder: Path, prompt: list[int], answer: list[int], kind: dict[str, Any], most: int
) -> tuple[int, int]:
    """(drafts, those that were right) of decoding with a draft model, by transformers and without a KV cache."""
    model = oracle_model(str(folder))
    drafted = accepted = 0
    done = 1  # the first token comes with the prompt
    while done < len(answer):
        guesses: list[int] = []
        for _ in range(min(most, len(answer) - done - 1)):
            ids = prompt + answer[:done] + guesses
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1].numpy()
            if kind["temperature"]:
                scaled = (logits - logits.max()) / np.float32(kind["temperature"])
                guesses.append(gumbel_argmax(np.exp(scaled), noise_key(5, len(ids))))
            else:
                guesses.append(int(logits.argmax()))
        right = 0
        while right < len(guesses) and guesses[right] == answer[done + right]:
            right += 1
        drafted, accepted, done = drafted + len(guesses), accepted + right, done + right + 1
    return drafted, accepted


def test_as_many_drafts_are_right_as_with_a_slow_reference(other_draft: Path) -> None:
    kinds = {str(t): {"temperature": t, "ignore_eos": True, "max_tokens": 60} for t in (0.0, 1.0)}
    plain, _ = answers("off", kinds)
    for name, kind in kinds.items():
        guessed, counts = answers(f"draft:{other_draft}", {name: kind}, speculate_tokens=4)
        [(tokens, _, _)] = guessed[name]
        assert tokens == plain[name][0][0]
        drafted, accepted = counts["draft"]
        drafts, right = reference_acceptance(other_draft, PROMPT_IDS, list(tokens), kind, 4)
        assert 0.1 < right / drafts < 0.95, "neither always nor never right"
        assert accepted / drafted == pytest.approx(right / drafts, abs=0.03)
