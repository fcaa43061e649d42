"""The demo model with guesses and without: the same tokens and log-probabilities, whatever a request asks for."""

from __future__ import annotations

from typing import Any

import pytest

from common.engine.drafting import Drafting
from common.node import parts
from common.node.parts import make_drafting
from common.node.plan import NodePlan
from kvrelay import LLM, SamplingParams

TEXT = "The quick brown fox jumps over the lazy dog, and the quick brown fox sleeps. "
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

    def __call__(self, plan: NodePlan) -> Drafting:
        self.made = make_drafting(plan)
        return self.made


def answers(speculate: str) -> tuple[dict[str, list[Any]], dict[str, tuple[int, int]]]:
    """For each kind the tokens and log-probabilities of its answers, all computed together; and the counts of guesses."""
    params = [SamplingParams(**{"max_tokens": 60, "seed": 5, **kind}) for kind in KINDS.values()]
    recorded = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "make_drafting", recorded)
        llm = LLM("demo", dtype="float32", kv_memory_gb=0.1, speculate=speculate, max_model_len=512)
    with llm:
        outputs = llm.generate([TEXT * 3] * len(params), params, use_tqdm=False)
    counts = {method: (count.drafted, count.accepted) for method, count in recorded.made.counts.items()}
    found: dict[str, list[Any]] = {}
    for kind, output in zip(KINDS, outputs, strict=True):
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
