"""Penalties and biases: against a plain re-statement, and replayed from token ids by any later attempt."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support.sampling_cases import adjusted_on_host, sample

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.sequence import Sequence
from common.engine.step import SampleSpec

VOCAB = 300


def sequence(prompt: list[int], generated: list[int], **params: Any) -> Sequence:
    sampling = SamplingParams(**{"seed": 3, "max_tokens": 500, **params})
    return Sequence(
        AttemptKey("r", 1), EngineRequest(pack_ids(prompt), sampling), prompt + generated, root_hash("f"), 0.0
    )


def spec_of(seq: Sequence) -> SampleSpec:
    return SampleSpec(0, 0, seq.request.sampling, seq.num_tokens, seq.tokens.num_generated, seq.tokens.seen())


def restated(row: np.ndarray, prompt: list[int], generated: list[int], params: SamplingParams) -> np.ndarray:
    """Every rule as its documentation says it, one token at a time, in float64."""
    out = row.astype(np.float64)
    if len(generated) < params.min_tokens:
        out[params.stop_token_ids] = -np.inf
    for token, bias in params.logit_bias:
        out[token] += bias
    for token in set(prompt) | set(generated):
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token, count in Counter(generated).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": 0.4},
    {"logit_bias": [(3, 50.0), (7, -100.0)]},
    {"logit_bias": [(3, 2.0)], "repetition_penalty": 2.0, "min_tokens": 400, "stop_token_ids": [5, 9]},
]


@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_a_row_is_changed_as_documented_and_greedy_takes_its_maximum(params: dict[str, Any]) -> None:
    draw = random.Random(1)
    logits = 4 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(2))
    for row in logits:
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 60))]
        generated = [draw.randrange(40) for _ in range(draw.randrange(60))]
        seq = sequence(prompt, generated, temperature=0.0, **params)
        expected = restated(row.numpy(), prompt, generated, seq.request.sampling)
        assert adjusted_on_host(row.numpy(), spec_of(seq)) == pytest.approx(expected, abs=1e-4)
        assert sample(row[None], [spec_of(seq)])[0].token_id == int(expected.argmax())


def test_without_any_of_them_the_row_is_not_even_copied() -> None:
    row = np.zeros(VOCAB, np.float32)
    seq = sequence([1, 2], [3], stop_token_ids=[4], min_tokens=1, top_p=0.5, temperature=0.7)
    assert seq.tokens.seen() is None
    assert adjusted_on_host(row, spec_of(seq)) is row


@pytest.mark.parametrize("params", PENALTIES[:4], ids=str)
def test_counting_as_tokens_come_equals_counting_an_attempt_that_continues(params: dict[str, Any]) -> None:
    draw = random.Random(7)
    prompt = [draw.randrange(VOCAB) for _ in range(50)]
    tokens = [draw.randrange(VOCAB) for _ in range(200)]
    growing = sequence(prompt, [], **params)
    row = np.linspace(-3, 3, VOCAB, dtype=np.float32)
    for index, token in enumerate(tokens):
        before = adjusted_on_host(row, spec_of(growing))
        continued = sequence(prompt, tokens[:index], **params)
        assert np.array_equal(before, adjusted_on_host(row, spec_of(continued))), index
        growing.tokens.ids.append(token)
