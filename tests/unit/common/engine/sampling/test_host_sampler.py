"""The sampler against a plain float64 re-statement of the filters, and its promises of independence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.sampling_cases import sample
from torch import Tensor

from common.control.messages import SamplingParams
from common.engine.step import SampleSpec

VOCAB = 2000


def spec(position: int = 5, num_generated: int = 3, **params: Any) -> SampleSpec:
    merged: dict[str, Any] = {"seed": 1, "max_tokens": 100, **params}
    return SampleSpec(0, 0, SamplingParams(**merged), position, num_generated)


def random_logits(rows: int, spread: float, vocab: int = VOCAB) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))


def allowed(row: Tensor, params: SamplingParams) -> dict[int, float]:
    """Probability of every token that may be drawn, by sorting everything."""
    x = row.double().numpy() / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    keep = p >= params.min_p * p.max()
    if params.top_k:
        kept = np.where(keep, p, -1.0)
        keep &= kept >= np.sort(kept)[-min(params.top_k, p.size)]
    p = np.where(keep, p, 0.0)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    inside = before < params.top_p
    inside[0] = True
    nucleus = order[inside & (p[order] > 0)]
    total = p[nucleus].sum()
    return {int(i): p[i] / total for i in nucleus}


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 0.0},
    {"top_p": 0.9, "temperature": 5.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.8, "temperature": 0.7},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_draws_follow_the_filtered_distribution(filters: dict[str, Any], spread: float) -> None:
    row = random_logits(1, spread)[0]
    draws = 1000
    specs = [spec(position=i, **filters) for i in range(draws)]
    tokens = [t.token_id for t in sample(row.expand(draws, -1), specs)]
    expected = allowed(row, specs[0].params)
    assert set(tokens) <= set(expected)
    # Over 20 groups of about equal mass, so that every group expects enough draws for a chi-square bound.
    groups: dict[int, int] = {}
    mass = 0.0
    for token, p in sorted(expected.items(), key=lambda item: -item[1]):
        groups[token] = min(19, int(mass * 20))
        mass += p
    want = np.zeros(20)
    for token, p in expected.items():
        want[groups[token]] += p * draws
    got = np.bincount([groups[t] for t in tokens], minlength=20)
    filled = want > 0
    assert ((got - want)[filled] ** 2 / want[filled]).sum() < 60


def test_every_token_that_may_be_drawn_can_be() -> None:
    row = torch.tensor([[1.0, 3.0, 2.0, -math.inf, 3.0]])
    seen = {sample(row, [spec(position=i)])[0].token_id for i in range(300)}
    assert seen == {0, 1, 2, 4}
    seen = {sample(row, [spec(position=i, top_k=1)])[0].token_id for i in range(50)}
    assert seen == {1, 4}, "ties with the k-th stay"


def test_a_token_depends_on_its_own_row_seed_and_position_only() -> None:
    logits = random_logits(6, 2.0)
    specs = [
        spec(temperature=0.0),
        spec(top_p=0.7, seed=2),
        spec(top_k=4, logprobs=3),
        spec(temperature=0.0, logprobs=1),
        spec(position=9, seed=2**64 - 1),
        spec(min_p=0.1, min_tokens=10, stop_token_ids=[int(logits[5].argmax())]),
    ]
    together = sample(logits, specs)
    assert together == [sample(logits[i : i + 1], [specs[i]])[0] for i in range(6)]
    backwards = sample(logits.flip(0), specs[::-1])
    assert together == backwards[::-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_cannot_be_drawn_before_min_tokens(temperature: float) -> None:
    logits = torch.full((1, 50), -20.0)
    logits[0, [3, 4]] = torch.tensor([20.0, 19.0])
    params = {"temperature": temperature, "min_tokens": 5, "stop_token_ids": [3, 10**6], "logprobs": 1}
    early = sample(logits, [spec(num_generated=4, **params)])[0]
    assert early.token_id == 4
    assert early.logprobs is not None
    # Log-probabilities are of the raw logits: the banned token still leads them.
    assert early.logprobs.top_ids == [3]
    assert early.logprobs.logprob == pytest.approx(logits.log_softmax(-1)[0, 4].item(), abs=1e-5)
    late = [sample(logits, [spec(num_generated=5, position=i, **params)])[0].token_id for i in range(40)]
    assert 3 in late


def test_logprobs_are_of_raw_logits_highest_first() -> None:
    logits = random_logits(2, 5.0)
    expected = logits.double().log_softmax(-1)
    for i, out in enumerate(sample(logits, [spec(temperature=0.2, top_k=3, logprobs=20), spec(logprobs=0)])):
        assert out.logprobs is not None
        assert out.logprobs.logprob == pytest.approx(expected[i, out.token_id].item(), abs=1e-5)
        best = expected[i].topk(20 if i == 0 else 0)
        assert out.logprobs.top_ids == best.indices.tolist()
        assert out.logprobs.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_of_named_tokens_come_in_their_order() -> None:
    logits = random_logits(1, 5.0)
    expected = logits.double().log_softmax(-1)[0]
    (out,) = sample(logits, [spec(temperature=0.0, logprobs=2, logprob_token_ids=[7, 3])])
    assert out.logprobs is not None
    assert out.logprobs.top_ids == [7, 3]
    assert out.logprobs.top_logprobs == pytest.approx([expected[7].item(), expected[3].item()], abs=1e-5)


def test_equal_logits_are_ranked_by_id_and_greedy_takes_the_first_of_them() -> None:
    logits = torch.zeros(1, 300)
    out = sample(logits, [spec(temperature=0.0, logprobs=4)])[0]
    assert out.token_id == 0
    assert out.logprobs is not None
    assert out.logprobs.top_ids == [0, 1, 2, 3]


def test_logits_are_not_changed_and_more_logprobs_than_tokens_give_all() -> None:
    logits = random_logits(1, 1.0, 6)
    before = logits.clone()
    out = sample(logits, [spec(min_tokens=9, stop_token_ids=[0, 1], logprobs=50)])[0]
    assert torch.equal(logits, before)
    assert out.logprobs is not None
    assert sorted(out.logprobs.top_ids) == list(range(6))


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 2}, {"temperature": 0.0}], ids=str)
def test_logits_without_a_finite_maximum_are_an_error_and_no_token(value: float, params: dict[str, Any]) -> None:
    logits = torch.full((2, 10), value)
    logits[0] = torch.arange(10.0)
    good, bad = sample(logits, [spec(**params), spec(**params)])
    assert good.error is None, "the other rows of the batch are unaffected"
    assert "highest logit" in (bad.error or "")


def test_single_nan_among_good_logits_is_an_error() -> None:
    logits = torch.arange(10.0)[None].clone()
    logits[0, 3] = math.nan
    assert "nan" in (sample(logits, [spec(logprobs=2)])[0].error or "")
