"""Banned tokens are not drawn; a row with no token left is an error of that row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.sampling_cases import VOCAB, logits_of, random_specs

from common.control.messages import SamplingParams
from common.engine.sampling.base import Sampler
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.sampling.host_sampler import HostSampler
from common.engine.sequence_tokens import mask_of
from common.engine.step import SampleSpec

SAMPLERS = pytest.mark.parametrize("sampler", [HostSampler(), DeviceSampler()], ids=["host", "device"])
KINDS: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3, "logprobs": 2}, {"min_p": 0.1}]


def spec(mask: list[int] | None = None, banned: list[int] | None = None, **params: Any) -> SampleSpec:
    sampling = SamplingParams(**{"seed": 3, "max_tokens": 9, **params})
    return SampleSpec(0, 0, sampling, 7, 2, None, None if mask is None else mask_of(mask), banned or [])


@SAMPLERS
@pytest.mark.parametrize("spread", [0.1, 6.0])
def test_no_banned_token_is_drawn(sampler: Sampler, spread: float) -> None:
    logits = logits_of(80, spread, 11)
    best = logits.topk(50).indices.tolist()
    specs = [each._replace(banned=[*ids, -1, VOCAB]) for each, ids in zip(random_specs(80, 12), best, strict=True)]
    for token, ids in zip(sampler.sample(logits, specs, None).wait(), best, strict=True):
        assert token.token_id not in ids
        assert token.error is None


@SAMPLERS
@pytest.mark.parametrize("params", KINDS, ids=str)
@pytest.mark.parametrize("left", [spec([5], [5]), spec([6], stop_token_ids=[6], min_tokens=9), spec([10**6])])
def test_a_row_without_any_allowed_token_is_an_error_of_that_row_alone(
    sampler: Sampler, params: dict[str, Any], left: SampleSpec
) -> None:
    empty = left._replace(params=left.params._replace(**params))
    specs = [spec(**params), empty, spec([4, 5], [5], **params)]
    drawn = sampler.sample(torch.zeros(3, 64), specs, None)
    assert all(0 <= token < 64 for token in drawn.token_ids.tolist()), "the next step may have started with them"
    free, none, only = drawn.wait()
    assert free.error is None
    assert (only.token_id, only.error) == (4, None)
    assert (none.token_id, none.error_code) == (-1, "no_token_allowed")
    assert "leave no token" in (none.error or "")


@SAMPLERS
def test_a_bias_does_not_unban(sampler: Sampler) -> None:
    biased = spec(banned=[3], logit_bias=[(3, 100.0), (4, 50.0)], temperature=0.0)
    assert sampler.sample(torch.zeros(1, 64), [biased], None).wait()[0].token_id == 4
