"""Batches in which every sequence has different sampling parameters, to compare samplers."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from common.control.messages import WHOLE_VOCABULARY, SamplingParams
from common.engine.sampling.host_sampler import HostSampler
from common.engine.sampling.logits_steps import GREEDY_STEPS
from common.engine.sampling.row_passes import Row, RowPasses
from common.engine.sampling.steps.base import DeviceRows, HostRow
from common.engine.sampling.top_k_top_p import Thresholds
from common.engine.seen_tokens import TokenCounter, counts_tokens
from common.engine.step import SampledToken, SampleSpec

VOCAB = 1999


def random_specs(rows: int, seed: int) -> list[SampleSpec]:
    """Any mix of parameters, with histories."""
    draw = random.Random(seed)
    specs = []
    for row in range(rows):
        logprobs = draw.choice([None, None, 0, 1, 20, WHOLE_VOCABULARY])
        params = SamplingParams(
            seed=draw.randrange(2**63),
            max_tokens=100,
            temperature=draw.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
            top_p=draw.choice([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999]),
            top_k=draw.choice([0, 0, 1, 2, 20, 500, VOCAB + 9]),
            min_p=draw.choice([0.0, 0.0, 0.001, 0.1, 1.0]),
            stop_token_ids=[draw.randrange(VOCAB) for _ in range(draw.choice([0, 3]))] + [10**6],
            min_tokens=draw.choice([0, 50]),
            logprobs=logprobs,
            logprob_token_ids=draw.sample(range(VOCAB), max(0, logprobs or 0)) if draw.random() < 0.5 else [],
            presence_penalty=draw.choice([0.0, 0.0, 1.5]),
            frequency_penalty=draw.choice([0.0, 0.0, -0.7]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
            logit_bias=draw.choice([[], [], [(3, 5.0), (7, -100.0), (10**6, 1.0)]]),
        )
        seen = None
        if counts_tokens(params):
            counter = TokenCounter([draw.randrange(VOCAB) for _ in range(40)], params)
            counter.add([draw.randrange(20) for _ in range(draw.randrange(30))])
            seen = counter.seen()
        banned = draw.choice([[], [], [draw.randrange(VOCAB) for _ in range(30)] + [10**6]])
        specs.append(SampleSpec(row, row, params, draw.randrange(10**6), draw.choice([3, 60]), seen, None, banned))
    return specs


def sample(logits: Tensor, specs: list[SampleSpec], passes: RowPasses | None = None) -> list[SampledToken]:
    """Draw tokens on the host."""
    return HostSampler(passes).sample(logits, specs, None).wait()


def adjusted_on_host(row: Row, spec: SampleSpec) -> Row:
    """`row` after the steps that apply to greedy draws, too."""
    on_its_way = HostRow(row, 0, np.empty_like(row), RowPasses())
    for step in GREEDY_STEPS:
        if step.asked_for([spec], row.size):
            step.on_host(on_its_way, spec)
    return on_its_way.values


def adjusted_on_device(logits: Tensor, specs: list[SampleSpec]) -> Tensor:
    """A batch after the steps that apply to greedy draws, too, on the device."""
    rows = DeviceRows(logits, specs, None, Thresholds())
    for step in GREEDY_STEPS:
        asked = step.asked_for(specs, logits.size(1))
        if asked:
            step.on_device(rows, asked)
    return rows.values


def logits_of(rows: int, spread: float, seed: int, *, coarse: bool = False) -> Tensor:
    logits = spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return (logits * 4).round() / 4 if coarse else logits  # coarse: many are equal
