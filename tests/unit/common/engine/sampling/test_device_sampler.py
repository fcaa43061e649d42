"""The sampler of a device against the one of the host, token by token; on a CPU, whose tensor operations are the same."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sampling_cases import adjusted_on_device, adjusted_on_host, logits_of, random_specs, sample
from torch import Tensor

from common.control.messages import SamplingParams
from common.control.whole_vocabulary import most_likely_of
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.sampling.host_sampler import HostSampler
from common.engine.sampling.top_k_top_p import FlashInferThresholds, Thresholds, ordered
from common.engine.seen_tokens import TokenCounter, counts_tokens
from common.engine.step import SampledToken, SampleSpec


def _renormed(probs: Tensor, kept: Tensor) -> Tensor:
    probs = torch.where(kept, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _top_k_renorm_probs(probs: Tensor, top_k: Tensor) -> Tensor:
    assert top_k.dtype == torch.int32
    lowest = probs.sort(-1, descending=True).values.gather(1, top_k.long()[:, None] - 1)
    return _renormed(probs, probs >= lowest)


def _top_p_renorm_probs(probs: Tensor, top_p: Tensor) -> Tensor:
    assert top_p.dtype == torch.float32
    ranked = probs.sort(-1, descending=True).values
    mass = ranked.double().cumsum(-1)
    at = torch.searchsorted(mass, top_p.double()[:, None]).clamp(max=probs.size(1) - 1)
    return _renormed(probs, probs >= ranked.gather(1, at))


FLASHINFER = SimpleNamespace(
    sampling=SimpleNamespace(top_k_renorm_probs=_top_k_renorm_probs, top_p_renorm_probs=_top_p_renorm_probs)
)
"""What these two of flashinfer's functions promise, by sorting."""
SAMPLERS = {"bisection": DeviceSampler(), "flashinfer's promise": DeviceSampler(FLASHINFER)}


def check_equal(got: list[SampledToken], want: list[SampledToken]) -> None:
    assert [t.token_id for t in got] == [t.token_id for t in want]
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert len(ours.logprobs.whole) == len(theirs.logprobs.whole)
            our_top, their_top = (list(most_likely_of(each)) for each in (ours.logprobs, theirs.logprobs))
            assert [token_id for token_id, _ in our_top] == [token_id for token_id, _ in their_top]
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-6)
            assert [each for _, each in our_top] == pytest.approx([each for _, each in their_top], abs=1e-6)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_draws_what_the_host_draws(name: str, spread: float) -> None:
    specs = random_specs(150, int(10 * spread))
    logits = logits_of(150, spread, 3)
    before = logits.clone()
    check_equal(SAMPLERS[name].sample(logits, specs, None).wait(), sample(logits, specs))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_what_the_host_draws_where_many_logits_are_equal(name: str) -> None:
    specs, logits = random_specs(150, 8), logits_of(150, 1.5, 4, coarse=True)
    check_equal(SAMPLERS[name].sample(logits, specs, None).wait(), sample(logits, specs))


@pytest.mark.parametrize("params", [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.2}, {"temperature": 0.0}], ids=str)
def test_one_row_alone_and_in_a_crowd(params: dict[str, Any]) -> None:
    logits = logits_of(20, 3.0, 5)
    specs = [SampleSpec(i, i, SamplingParams(**{"seed": i, "max_tokens": 9, **params}), 50 + i, 0) for i in range(20)]
    together = DeviceSampler().sample(logits, specs, None)
    alone = [DeviceSampler().sample(logits[i : i + 1], [specs[i]], None).wait()[0] for i in range(20)]
    check_equal(together.wait(), alone)
    check_equal(alone, sample(logits, specs))
    assert together.token_ids.tolist() == [token.token_id for token in alone]


def test_a_token_that_the_host_has_not_seen_counts() -> None:
    draw = random.Random(2)
    made: list[tuple[SampleSpec, SampleSpec, int]] = []
    for row in range(60):
        params = SamplingParams(
            seed=row,
            max_tokens=9,
            temperature=draw.choice([0.0, 1.0]),
            presence_penalty=draw.choice([0.0, 1.0]),
            frequency_penalty=draw.choice([0.0, 3.0]),
            repetition_penalty=draw.choice([1.0, 1.5]),
        )
        prompt = [draw.randrange(20) for _ in range(5)]
        generated = [draw.randrange(20) for _ in range(draw.randrange(6))]
        late = draw.randrange(20)
        counters = TokenCounter(prompt, params), TokenCounter(prompt, params)
        counters[0].add(generated)
        counters[1].add([*generated, late])
        counted = counts_tokens(params)
        unknowing, knowing = (SampleSpec(row, row, params, 30, 5, c.seen() if counted else None) for c in counters)
        made.append((unknowing, knowing, late if counted and row % 3 else -1))
    logits = logits_of(60, 2.0, 6)
    logits[:, :20] += 6
    given = [unknowing for unknowing, _, _ in made]
    want = sample(logits, [unknowing if late < 0 else knowing for unknowing, knowing, late in made])
    unseen = torch.tensor([late for _, _, late in made])
    check_equal(DeviceSampler().sample(logits, given, unseen).wait(), want)
    check_equal(HostSampler().sample(logits, given, unseen).wait(), want)


def test_penalties_and_biases_are_the_hosts_to_the_last_bit() -> None:
    specs, logits = random_specs(100, 9), logits_of(100, 4.0, 7)
    wanted = adjusted_on_device(logits, specs)
    for row, spec in enumerate(specs):
        assert torch.equal(wanted[row], torch.from_numpy(adjusted_on_host(logits[row].numpy(), spec))), row
    untouched = [SampleSpec(0, 0, SamplingParams(seed=1, max_tokens=1), 1, 0)] * 100
    assert adjusted_on_device(logits, untouched) is logits


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 2}, {"temperature": 0.0}], ids=str)
def test_logits_without_a_finite_maximum_are_an_error_of_the_wait_and_a_token_in_range(
    value: float, params: dict[str, Any]
) -> None:
    logits = torch.full((2, 10), value)
    logits[0] = torch.arange(10.0)
    specs = [SampleSpec(i, i, SamplingParams(**{"seed": 1, "max_tokens": 1, **params}), 5, 0) for i in range(2)]
    draws = DeviceSampler().sample(logits, specs, None)
    assert all(0 <= token < 10 for token in draws.token_ids.tolist()), "the next step may have started with them"
    good, bad = draws.wait()
    assert good.error is None, "the other rows of the batch are unaffected"
    assert "highest logit" in (bad.error or "")


def test_nothing_waits_for_a_value_of_the_device_before_the_wait() -> None:
    from support.replaying import ReplayingCapture

    specs, logits = random_specs(40, 10), logits_of(40, 1.0, 8)
    unseen = torch.full((40,), -1)
    ReplayingCapture().capture(lambda: SAMPLERS["bisection"].sample(logits, specs, unseen) and None)


def test_thresholds_of_both_kinds_agree_with_a_sort() -> None:
    x = logits_of(30, 2.0, 9, coarse=True)
    x -= x.amax(-1, keepdim=True)
    x[3, 5:900] = -math.inf
    weights = x.exp()
    count = torch.tensor([[1 + (37 * i) % 900] for i in range(30)])
    want = x.sort(-1, descending=True).values.gather(1, count - 1)
    mass = torch.rand(30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mass *= weights.sum(-1, keepdim=True, dtype=torch.float64)
    for thresholds in (Thresholds(), FlashInferThresholds(FLASHINFER)):
        assert torch.equal(thresholds.of_count(x, count), want)
        at = thresholds.of_mass(x, weights, mass)
        above = torch.where(x > at, weights, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        reached = torch.where(x >= at, weights, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        assert bool((above <= mass * (1 + 1e-6)).all())
        assert bool((reached >= mass * (1 - 1e-6)).all())


def test_ordered_numbers_sort_as_the_floats_do() -> None:
    values = torch.tensor([-math.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, math.inf])
    keys = ordered(values).tolist()
    assert keys == sorted(keys)
    assert keys[4] == keys[5]
    assert len(set(keys)) == len(keys) - 1
