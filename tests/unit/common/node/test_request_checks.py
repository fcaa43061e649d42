"""Requests that would fail a step for everyone are refused at the door."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.base.errors import BadRequest
from common.control.identities import pack_ids
from common.control.messages import EngineRequest, SamplingParams
from common.node.request_checks import check_request

VOCAB = 100
GOOD = SamplingParams(seed=2**64 - 1, max_tokens=1, logprobs=VOCAB, prompt_logprobs=0, logit_bias=[(99, -100.0)])


def check(sampling: SamplingParams = GOOD, prompt: list[int] | None = None, generated: list[int] | None = None) -> None:
    request = EngineRequest(pack_ids([0, 99] if prompt is None else prompt), sampling)
    check_request(request, [*request.prompt_ids, *(generated or [])], VOCAB)


def test_the_edges_of_every_range_are_accepted() -> None:
    check()
    check(GOOD._replace(temperature=0.0, top_p=1.0, min_p=1.0, stop_token_ids=[VOCAB + 5], bad_words=[[1, VOCAB]]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_k": -1},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"logprobs": -2},
        {"logprobs": VOCAB + 1},
        {"prompt_logprobs": 2**20},
        {"prompt_logprobs": -2},
        {"logit_bias": [(VOCAB, 1.0)]},
        {"logit_bias": [(-1, 1.0)]},
        {"logit_bias": [(1, math.nan)]},
        {"allowed_token_ids": [VOCAB]},
        {"stop_token_ids": [1] * 5000},
        {"bad_words": [[]]},
        {"bad_words": [[1]] * 5000},
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        check(GOOD._replace(**wrong))


@pytest.mark.parametrize(("prompt", "generated"), [([], []), ([VOCAB], []), ([1], [VOCAB]), ([1], [-1])])
def test_tokens_outside_the_vocabulary_and_empty_prompts_are_refused(prompt: list[int], generated: list[int]) -> None:
    with pytest.raises(BadRequest):
        check(prompt=prompt, generated=generated)
