"""Masks over the vocabulary: a masked row never draws a forbidden token, on the host and on a device alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.sampling_cases import VOCAB, adjusted_on_device, adjusted_on_host, logits_of, random_specs, sample

from common.control.messages import SamplingParams
from common.engine.sampling.base import Sampler
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.sampling.host_sampler import HostSampler
from common.engine.step import SampleSpec, StepInput
from common.node.ranks.messages import RankCodec


def mask_of(allowed: list[int]) -> bytes:
    """As grammar libraries make it: bit i % 32 of int32 word i // 32."""
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)
    return words.view(np.int32).tobytes()


def masked_specs(rows: int, seed: int) -> tuple[list[SampleSpec], list[set[int] | None]]:
    """Any mix of parameters, every third row without a mask."""
    draw = np.random.default_rng(seed)
    specs: list[SampleSpec] = []
    allowed: list[set[int] | None] = []
    for row, spec in enumerate(random_specs(rows, seed)):
        ids = None if row % 3 == 0 else {0, *draw.choice(VOCAB, draw.integers(1, 300)).tolist(), VOCAB - 1}
        stops = spec.params._replace(stop_token_ids=[])  # a ban of all that a mask allows leaves nothing to draw
        specs.append(spec._replace(params=stops, banned=[], mask=None if ids is None else mask_of(sorted(ids))))
        allowed.append(ids)
    return specs, allowed


@pytest.mark.parametrize("sampler", [HostSampler(), DeviceSampler()], ids=["host", "device"])
@pytest.mark.parametrize("spread", [0.1, 6.0])
def test_no_forbidden_token_is_drawn_and_log_probabilities_are_of_raw_logits(sampler: Sampler, spread: float) -> None:
    specs, allowed = masked_specs(120, 31)
    logits = logits_of(120, spread, 32)
    before, raw = logits.clone(), logits.double().log_softmax(-1)
    tokens = sampler.sample(logits, specs, None).wait()
    for row, (token, ids) in enumerate(zip(tokens, allowed, strict=True)):
        assert ids is None or token.token_id in ids, specs[row]
        if token.logprobs is not None:
            assert token.logprobs.logprob == pytest.approx(raw[row, token.token_id].item(), abs=1e-5)
    assert [token.token_id for token in tokens] == [token.token_id for token in sample(logits, specs)]
    assert torch.equal(logits, before)


def test_the_other_rows_of_a_batch_draw_as_without_any_mask() -> None:
    specs, allowed = masked_specs(60, 33)
    logits = logits_of(60, 2.0, 34)
    free = [spec._replace(mask=None) for spec in specs]
    for sampler in (HostSampler(), DeviceSampler()):
        pairs = zip(sampler.sample(logits, specs, None).wait(), sampler.sample(logits, free, None).wait(), strict=True)
        assert all(ours == theirs for (ours, theirs), ids in zip(pairs, allowed, strict=True) if ids is None)


def test_host_and_device_mask_the_same_logits() -> None:
    specs, allowed = masked_specs(40, 35)
    logits = logits_of(40, 1.0, 36)
    on_device = adjusted_on_device(logits, specs)
    for row, (spec, ids) in enumerate(zip(specs, allowed, strict=True)):
        on_host = adjusted_on_host(logits[row].numpy(), spec)
        assert torch.equal(on_device[row], torch.from_numpy(on_host))
        assert ids is None or set(np.flatnonzero(np.isfinite(on_host)).tolist()) == ids


def test_tokens_past_the_end_of_a_mask_are_forbidden() -> None:
    logits = torch.zeros(1, 100)
    logits[0, 64:] = 9.0
    spec = SampleSpec(0, 0, SamplingParams(seed=0, max_tokens=1, temperature=0.0), 1, 0, mask=b"\xff" * 8)
    for sampler in (HostSampler(), DeviceSampler()):
        assert sampler.sample(logits, [spec], None).wait()[0].token_id == 0


def test_a_mask_travels_with_the_step_to_the_ranks() -> None:
    codec = RankCodec()
    spec = SampleSpec(0, 0, SamplingParams(seed=0, max_tokens=1), 1, 0, mask=mask_of([1, 77]))
    step = StepInput(1, [1], [0], [[0]], [1], [1], [[[0]]], 1, [spec])
    assert codec.decode(codec.encode(step)) == step
