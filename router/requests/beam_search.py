"""Beam search: the continuations of a prompt whose tokens are the most likely together. Pure.

Each step takes the most likely next tokens of every beam, and keeps the best `width` of all of them. Source: `beam_search` and
`get_beam_search_score` of vllm-project/vllm; the search ends earlier than there, where no later beam can change the result.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from common.control.messages import TokenLogprobs


class Beam(NamedTuple):
    """One continuation. `total`: the sum of its tokens' log-probabilities."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    has_ended: bool = False
    """Whether its last token ends the answer."""


@dataclass(frozen=True)
class BeamOptions:
    """How a client wants its beams."""

    width: int
    length_penalty: float
    """A beam's score is `total` divided by its length, prompt included, to this power."""

    @property
    def num_candidates(self) -> int:
        """Next tokens to look at: if half of them end the answer, enough go on."""
        return 2 * self.width


class BeamSearch:
    """The beams of one prompt."""

    def __init__(self, options: BeamOptions, *, prompt_len: int, max_tokens: int, ends: Set[int]) -> None:
        """`ends`: tokens that end an answer."""
        self.beams: list[Beam] = [Beam()]
        """Those to continue, equally long."""
        self._ended: list[Beam] = []
        self._options, self._ends = options, ends
        self._prompt_len, self._max_tokens = prompt_len, max_tokens

    @property
    def is_over(self) -> bool:
        """Whether `best` is final."""
        length = len(self.beams[0].token_ids) if self.beams else self._max_tokens
        if length >= self._max_tokens:
            return True
        if len(self._ended) < self._options.width:
            return False
        # No total grows, so that a beam scores best at one end of the lengths that it can reach.
        longest = self._max_tokens if self._options.length_penalty > 0 else length
        reachable = max(self._scaled(beam.total, longest) for beam in self.beams)
        return self._score(self._ended[-1]) >= reachable

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """Continue each of `beams` by one token. found: the most likely next tokens of each."""
        going: list[tuple[float, int, int]] = []
        for index, (beam, following) in enumerate(zip(self.beams, found, strict=True)):
            for place, token_id in enumerate(following.top_ids):
                if token_id in self._ends:
                    self._ended.append(_continued(beam, following, place, has_ended=True))
                else:
                    going.append((beam.total + following.top_logprobs[place], index, place))
        kept = heapq.nlargest(self._options.width, going, key=lambda each: each[0])
        self.beams = [_continued(self.beams[index], found[index], place) for _, index, place in kept]
        self._ended = self._best_of(self._ended)

    def best(self) -> list[Beam]:
        """The best `width` beams, the best one first."""
        return self._best_of([*self._ended, *self.beams])

    def _best_of(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self._options.width]

    def _score(self, beam: Beam) -> float:
        return self._scaled(beam.total, len(beam.token_ids) - beam.has_ended)

    def _scaled(self, total: float, num_tokens: int) -> float:
        """In the order of `total` / length^`length_penalty`, by logarithms: the power itself may be too large for a float."""
        if total >= 0:
            return math.inf
        return self._options.length_penalty * math.log(self._prompt_len + num_tokens) - math.log(-total)


def _continued(beam: Beam, following: TokenLogprobs, place: int, *, has_ended: bool = False) -> Beam:
    logprob = following.top_logprobs[place]
    return Beam(
        (*beam.token_ids, following.top_ids[place]),
        (*beam.logprobs, following._replace(logprob=logprob)),
        beam.total + logprob,
        has_ended,
    )
