"""A beam search finds what the plain search of vLLM finds, in fewer steps."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from common.control.messages import TokenLogprobs
from router.requests.beam_search import BeamOptions, BeamSearch

_VOCAB, _END = 7, 6


def following(tokens: tuple[int, ...], count: int, seed: int) -> TokenLogprobs:
    """Random log-probabilities of the tokens behind these."""
    rng = random.Random(f"{seed}{tokens}")
    found = sorted(((rng.uniform(-4, -0.1), token) for token in range(_VOCAB)), reverse=True)[:count]
    return TokenLogprobs(0.0, [token for _, token in found], [logprob for logprob, _ in found])


def plain(width: int, penalty: float, prompt_len: int, max_tokens: int, seed: int) -> list[tuple[int, ...]]:
    """As vLLM's loop: all steps, then the best of all."""

    def score(beam: tuple[tuple[int, ...], float]) -> float:
        tokens, total = beam
        return total / (prompt_len + len(tokens) - (tokens[-1:] == (_END,))) ** penalty

    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        going: list[tuple[tuple[int, ...], float]] = []
        for tokens, total in beams:
            found = following(tokens, 2 * width, seed)
            for token, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
                (ended if token == _END else going).append(((*tokens, token), total + logprob))
        beams = sorted(going, key=score, reverse=True)[:width]
    return [tokens for tokens, _ in sorted([*ended, *beams], key=score, reverse=True)[:width]]


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_beams_are_those_of_all_steps(width: int, penalty: float) -> None:
    steps = 0
    for seed in range(30):
        options = BeamOptions(width, penalty)
        search = BeamSearch(options, prompt_len=3, max_tokens=9, ends={_END})
        while not search.is_over:
            steps += 1
            search.advance([following(beam.token_ids, options.num_candidates, seed) for beam in search.beams])
        best = search.best()
        assert [beam.token_ids for beam in best] == plain(width, penalty, 3, 9, seed)
        assert all(beam.total == pytest.approx(sum(each.logprob for each in beam.logprobs)) for beam in best)
        assert all(beam.has_ended == (beam.token_ids[-1] == _END) for beam in best)
    if penalty == 0.0:
        assert steps < 30 * 9  # no longer beam can be better than ended ones


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_a_penalty_whose_power_is_no_float_orders_long_beams(penalty: float) -> None:
    search = BeamSearch(BeamOptions(4, penalty), prompt_len=5000, max_tokens=9, ends={_END})
    while not search.is_over:
        search.advance([following(beam.token_ids, 7, seed=1) for beam in search.beams])
    lengths = [5000 + len(beam.token_ids) - beam.has_ended for beam in search.best()]
    exact = [
        Fraction(beam.total) / Fraction(length) ** int(penalty)
        for beam, length in zip(search.best(), lengths, strict=True)
    ]
    assert len(set(lengths)) > 1
    assert exact == sorted(exact, reverse=True)
