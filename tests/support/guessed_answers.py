"""Answers of one process with guesses and without, and guesses that are made slowly."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from common.engine.draft_head import DraftHeadProposer
from common.engine.drafting import Drafting
from common.engine.sampling.gumbel import gumbel_argmax, noise_key
from common.node import parts
from common.node.parts import make_drafting
from common.node.plan import NodePlan
from common.node.worker import Worker
from kvrelay import LLM, SamplingParams

SEED = 5
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

    def __call__(self, plan: NodePlan, draft: Worker | None = None, head: DraftHeadProposer | None = None) -> Drafting:
        self.made = make_drafting(plan, draft, head)
        self.made._always = draft is not None or head is not None  # however slow a test's draft model is
        return self.made

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the node that is made inside."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "make_drafting", self)
            yield


def answers(
    speculate: str,
    prompt_ids: list[int],
    kinds: dict[str, dict[str, Any]] = KINDS,
    model: str = "demo",
    **options: Any,
) -> tuple[dict[str, list[Any]], dict[str, tuple[int, int]]]:
    """For each kind the tokens and log-probabilities of its answers, all computed together; and the counts of guesses."""
    params = [SamplingParams(**{"max_tokens": 60, "seed": SEED, **kind}) for kind in kinds.values()]
    recorded = Recorded()
    with recorded.recording():
        fixed = {"dtype": "float32", "kv_memory_gb": 0.1, "max_model_len": 512, "speculate": speculate}
        llm = LLM(model, **{**fixed, **options})
    with llm:
        outputs = llm.generate([prompt_ids] * len(params), params, use_tqdm=False)
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


def slow_draw(logits: np.ndarray, temperature: float, seed: int, position: int) -> int:
    """The token that kvrelay draws at a position."""
    if not temperature:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / np.float32(temperature)
    return gumbel_argmax(np.exp(scaled), noise_key(seed, position))


def slow_acceptance(
    guess: Callable[[list[int], int], list[int]], prompt: list[int], answer: list[int], most: int
) -> tuple[int, int]:
    """(drafts, those that were right) of decoding `answer`, with at most `most` guesses in a step. `guess(ids, count)`: the
    guesses after `ids`."""
    drafted = accepted = 0
    done = 1  # the first token comes with the prompt
    while done < len(answer):
        guesses = guess(prompt + answer[:done], min(most, len(answer) - done - 1))
        right = 0
        while right < len(guesses) and guesses[right] == answer[done + right]:
            right += 1
        drafted, accepted, done = drafted + len(guesses), accepted + right, done + right + 1
    return drafted, accepted
