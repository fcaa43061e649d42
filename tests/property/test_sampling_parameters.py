"""Combinations of sampling parameters, through scheduler and runner, against a slow sampler on transformers' logits.

The reference here shares only the random numbers with the engine. It is given the engine's tokens so far, and a token is
right if it is the reference's own or, where rounding decides, as good.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.oracle import make_tiny, prompt_logits, prompt_logprobs
from support.runner_cases import check_scored
from support.tiny_engine import NUM_BLOCKS, VOCAB, make_runner

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, PromptLogprobs, SamplingParams
from common.engine.runner import LaunchedStep, ModelRunner
from common.engine.sampling.device_sampler import DeviceSampler
from common.engine.sampling.gumbel import noise_key, strides_of, uniforms
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.kv.pool import BlockPool

Row = NDArray[np.float64]

TOKENS = st.integers(3, VOCAB - 1)
FEW = st.lists(TOKENS, max_size=20)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=60)
PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    },
    optional={
        "top_p": st.sampled_from([0.2, 0.7, 0.95]),
        "top_k": st.sampled_from([1, 3, 40]),
        "min_p": st.sampled_from([0.02, 0.3]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 2.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.6]),
        "logit_bias": st.lists(st.tuples(TOKENS, st.floats(-20, 20)), max_size=5, unique_by=lambda each: each[0]),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": FEW,
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=40, unique=True),
        "bad_words": WORDS,
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 5),
    },
)
REQUESTS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=24), PARAMS), min_size=1, max_size=4)


@dataclass
class Answer:
    tokens: list[SampledToken] = field(default_factory=list)
    scored: list[PromptLogprobs] = field(default_factory=list)
    reason: str | None = None


def run(runner: ModelRunner, requests: list[tuple[list[int], dict[str, Any]]], depth: int) -> list[Answer]:
    scheduler = Scheduler(SchedulerConfig(128, 4, 32, 8, depth=depth), BlockPool(NUM_BLOCKS))
    answers = {AttemptKey(f"r{n}", 1): Answer() for n in range(len(requests))}
    for key, (prompt, params) in zip(answers, requests, strict=True):
        request = EngineRequest(pack_ids(prompt), SamplingParams(**params))
        scheduler.add(Sequence(key, request, list(prompt), root_hash("f"), 0.0))
    flying: deque[tuple[ScheduledStep, LaunchedStep]] = deque()
    while not scheduler.is_idle() or flying:
        scheduled = scheduler.schedule()
        if scheduled is not None:
            flying.append((scheduled, runner.launch(scheduled.step)))
        if scheduled is None or len(flying) == depth:
            landing, launched = flying.popleft()
            output = launched.wait()
            for done in scheduler.update(landing, output.sampled, output.prompt_logprobs):
                answer = answers[done.seq.key]
                answer.tokens += done.tokens
                answer.scored += done.prompt_logprobs
                answer.reason = done.finish_reason
                if done.error is not None:
                    answer.reason = done.error.code
                    scheduler.end(done.seq, done.error.code)
    assert scheduler.pool.num_used == 0
    return list(answers.values())


def adjusted(row: Row, params: SamplingParams, prompt: list[int], generated: list[int]) -> Row:
    """Logits after masks, bans, biases and penalties."""
    out = row.copy()
    if params.allowed_token_ids:
        out[[i for i in range(out.size) if i not in params.allowed_token_ids]] = -math.inf
    for word in params.bad_words:
        if generated[len(generated) - len(word) + 1 :] == word[:-1] and len(generated) >= len(word) - 1:
            out[word[-1]] = -math.inf
    if len(generated) < params.min_tokens:
        out[params.stop_token_ids] = -math.inf
    for token, bias in params.logit_bias:
        out[token] += bias
    for token in {*prompt, *generated} if params.repetition_penalty != 1.0 else ():
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token, count in Counter(generated).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


def candidates(logits: Row, params: SamplingParams, slack: float) -> Row:
    """[vocab] probabilities of the tokens that the filters leave, 0 for others; `slack` moves every edge outwards."""
    x = (logits - logits.max()) / params.temperature
    kept = x > -math.inf
    if params.min_p:
        kept &= x >= math.log(params.min_p) - slack
    if params.top_k:
        kept &= x >= np.sort(x)[-params.top_k] - slack
    p = np.where(kept, np.exp(x), 0.0)
    if params.top_p < 1.0:
        order = np.argsort(-p, kind="stable")
        mass = np.cumsum(p[order]) / p.sum()
        last = min(int(np.searchsorted(mass, params.top_p + slack)), p.size - 1)
        p = np.where(p >= p[order[last]] * (1 - slack), p, 0.0)
    return p


def is_right(token: int, logits: Row, params: SamplingParams, position: int) -> bool:
    if params.temperature == 0.0:
        return bool(logits[token] >= logits.max() - 1e-3)
    uniform = uniforms(noise_key(params.seed, position), strides_of(np.arange(logits.size)))
    noise = -np.log1p(-np.minimum(uniform.astype(np.float64), 1 - 2.0**-24))
    draws = candidates(logits, params, 0.0) / noise
    wide = candidates(logits, params, 1e-3) / noise
    return bool(wide[token] >= draws.max() * (1 - 1e-2))


def check(folder: Path, prompt: list[int], params: SamplingParams, answer: Answer) -> None:
    generated = [token.token_id for token in answer.tokens]
    # One row past the last token: that of a draw that left none.
    logits = prompt_logits(folder, [*prompt, *generated, 3])
    raw, logprobs = logits.numpy(), logits.log_softmax(-1).numpy()
    for index, token in enumerate(answer.tokens):
        place = len(prompt) - 1 + index
        left = adjusted(raw[place], params, prompt, generated[:index])
        assert is_right(token.token_id, left, params, len(prompt) + index), (index, generated)
        assert (token.logprobs is None) == (params.logprobs is None)
        if token.logprobs is not None:
            assert token.logprobs.logprob == pytest.approx(logprobs[place, token.token_id], abs=1e-4)
            best = np.sort(logprobs[place])[::-1][: params.logprobs or 0]
            assert token.logprobs.top_logprobs == pytest.approx(best.tolist(), abs=1e-4)
    if answer.reason == "stop":
        assert generated[-1] in params.stop_token_ids
    elif answer.reason == "length":
        assert len(generated) == params.max_tokens
    else:
        assert answer.reason == "no_token_allowed"
        assert adjusted(raw[-1], params, prompt, generated).max() == -math.inf
    assert not set(generated[:-1]) & set(params.stop_token_ids)
    if params.prompt_logprobs is None:
        assert not answer.scored
    elif answer.tokens:  # a request that fails with its first draw sends no more
        check_scored(prompt, answer.scored, prompt_logprobs(folder, prompt))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3")


@functools.cache
def runner_of(folder: Path, depth: int, *, on_device: bool) -> ModelRunner:
    return make_runner(folder, overlaps=depth > 1, sampler=DeviceSampler() if on_device else None)


def compare(folder: Path, requests: list[tuple[list[int], dict[str, Any]]], depth: int, *, on_device: bool) -> None:
    answers = run(runner_of(folder, depth, on_device=on_device), requests, depth)
    for (prompt, params), answer in zip(requests, answers, strict=True):
        check(folder, prompt, SamplingParams(**params), answer)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=REQUESTS, depth=st.sampled_from([1, 2]), on_device=st.booleans())
def test_every_combination_draws_the_tokens_of_the_reference(
    folder: Path, requests: list[tuple[list[int], dict[str, Any]]], depth: int, *, on_device: bool
) -> None:
    compare(folder, requests, depth, on_device=on_device)


@pytest.mark.thorough
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=REQUESTS, depth=st.sampled_from([1, 2]), on_device=st.booleans())
def test_many_combinations_draw_the_tokens_of_the_reference(
    folder: Path, requests: list[tuple[list[int], dict[str, Any]]], depth: int, *, on_device: bool
) -> None:
    compare(folder, requests, depth, on_device=on_device)
