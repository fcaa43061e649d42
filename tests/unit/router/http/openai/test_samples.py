"""`n` and `best_of`: the samples of a request, and which ones are returned."""

from __future__ import annotations

from dataclasses import replace

from common.control.identities import pack_ids
from common.control.messages import EngineRequest, SamplingParams, TokenLogprobs
from router.http.openai.samples import most_likely, samples
from router.requests.request import Delta, GenerationRequest

REQUEST = GenerationRequest(EngineRequest(pack_ids([1, 2]), SamplingParams(seed=2**64 - 1, max_tokens=4)))


def test_samples_differ_in_their_seeds_only_and_the_first_is_the_request_alone() -> None:
    found = samples(REQUEST, 4, ranked=False)
    assert found[0].engine == REQUEST.engine
    assert len({each.engine.sampling.seed for each in found}) == 4
    assert len({id(each.shared) for each in found}) == 1
    same = [replace(each, engine=REQUEST.engine, shared=None) for each in found]
    assert same == [REQUEST] * 4
    assert samples(REQUEST, 1, ranked=False) == [REQUEST]


def test_samples_to_rank_ask_for_log_probabilities() -> None:
    assert [each.engine.sampling.logprobs for each in samples(REQUEST, 2, ranked=True)] == [0, 0]


def _answer(*logprobs: float) -> list[Delta]:
    return [Delta("", [0], [TokenLogprobs(value, [], [])]) for value in logprobs]


def test_the_most_likely_answers_per_token_are_returned_for_each_prompt() -> None:
    deltas = [_answer(-1.0), _answer(-0.5, -0.5, -0.5), _answer(-2.0), _answer(-3.0), _answer(-1.0), _answer(-2.0)]
    assert most_likely(deltas, computed=3, returned=2) == [1, 0, 4, 5]
