"""The requests of a run: a trace, overlaid copies of a trace, two traces whose shares turn, or synthetic ones. Pure.

The synthetic ones are conversations, or prompts of two kinds whose shares turn.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from common.base.hashing import HASH_BYTES, BlockHash
from router.simulator.request import SimRequest
from router.simulator.traces import TraceLine

_NAMES = 1 << (8 * HASH_BYTES)
_ODD = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""2^128 / golden ratio, odd, so that different numbers have different products modulo 2^128."""


def block_name(copy: int, hash_id: int) -> BlockHash:
    """The name of a block in one copy of the trace, different in each copy. Names are evenly distributed, as the index needs."""
    return (((copy & 0xFFFFFFFF) << 64 | hash_id) * _ODD & _NAMES - 1).to_bytes(HASH_BYTES, "little")


def from_trace(
    lines: Sequence[TraceLine], *, requests: int | None = None, rate_scale: float = 1.0, seed: int = 0
) -> Iterator[SimRequest]:
    """The first `requests` (default: all of the trace), arriving `rate_scale` times as fast, the first at 0.

    If that is more than the trace has, copies with their own block names are overlaid, each starting at another point of
    the trace: the rate grows with the number of copies, and the reuse within each stays the same.
    """
    wanted = len(lines) if requests is None else requests
    copies = -(-wanted // len(lines))
    span_s = lines[-1].arrival_s - lines[0].arrival_s + 1.0
    rng = random.Random(seed)
    starts = [0] + [rng.randrange(len(lines)) for _ in range(copies - 1)]
    streams = [_one_copy(lines, copy, start, span_s) for copy, start in enumerate(starts)]
    numbers = count()
    for arrival_s, copy, line in islice(heapq.merge(*streams, key=lambda item: item[:2]), wanted):
        names = [block_name(copy, hash_id) for hash_id in line.hash_ids]
        arrived_s = arrival_s / rate_scale
        yield SimRequest(next(numbers), arrived_s, line.input_tokens, line.output_tokens, names)


def _one_copy(
    lines: Sequence[TraceLine], copy: int, start: int, span_s: float
) -> Iterator[tuple[float, int, TraceLine]]:
    """(arrival, copy, line) of the whole trace, starting at line `start` and wrapping around."""
    begin_s = lines[start].arrival_s
    for line in lines[start:]:
        yield line.arrival_s - begin_s, copy, line
    for line in lines[:start]:
        yield line.arrival_s + span_s - begin_s, copy, line


SHARES = 0.8, 0.2
"""Shares of the first of two kinds of requests, at the beginning of a period and in its middle."""


def share_of_first(now_s: float, period_s: float) -> float:
    """The share of the first kind, which turns with the period."""
    high, low = SHARES
    return (high + low) / 2 + (high - low) / 2 * math.cos(2 * math.pi * now_s / period_s)


def joined(
    pair: Sequence[Sequence[TraceLine]], *, requests: int, rates: Sequence[float], period_s: float, seed: int = 0
) -> Iterator[SimRequest]:
    """Requests of two traces. The first has 80 % of its rate at the beginning of a period and 20 % in its middle, the second
    the reverse. rates: requests per second of each.

    Copies of each trace are overlaid, begin again at their end under new block names, and are thinned by whole conversations: by
    the second block of a prompt, because many conversations begin with the same system prompt.
    """

    def present(kind: int, now_s: float) -> float:
        share = share_of_first(now_s, period_s)
        return rates[kind] * (1 - share if kind else share)

    streams = [
        _thinned(lines, rates[kind] * max(SHARES), lambda now_s, kind=kind: present(kind, now_s), seed * 2 + kind)
        for kind, lines in enumerate(pair)
    ]
    merged = heapq.merge(*streams, key=lambda item: item[0])
    for number, (arrival_s, names, line) in enumerate(islice(merged, requests)):
        yield SimRequest(number, arrival_s, line.input_tokens, line.output_tokens, names)


def _thinned(
    lines: Sequence[TraceLine], most: float, wanted: Callable[[float], float], seed: int
) -> Iterator[tuple[float, list[BlockHash], TraceLine]]:
    """(arrival, names of the blocks, line) without end: `wanted` requests per second at each time, at most `most`."""
    span_s = lines[-1].arrival_s - lines[0].arrival_s + 1.0
    copies = math.ceil(most * span_s / len(lines))
    own_rate = copies * len(lines) / span_s
    rng = random.Random(seed)
    starts = [rng.randrange(len(lines)) for _ in range(copies)]
    for turn in count():
        streams = [_one_copy(lines, copy, start, span_s) for copy, start in enumerate(starts)]
        for arrival_s, copy, line in heapq.merge(*streams, key=lambda item: item[:2]):
            now_s = turn * span_s + arrival_s
            name = (seed << 24) + turn * copies + copy
            drawn = int.from_bytes(block_name(name, line.hash_ids[min(1, len(line.hash_ids) - 1)]), "little") / _NAMES
            if drawn < wanted(now_s) / own_rate:
                yield now_s, [block_name(name, hash_id) for hash_id in line.hash_ids], line


@dataclass(frozen=True)
class SyntheticConversations:
    """Conversations that share system prompts: each turn's prompt is the whole conversation so far and new text."""

    requests: int = 10_000
    rate: float = 4.0
    """Arrivals per second, Poisson."""
    groups: int = 50
    """System prompts; the popularity of the k-th is proportional to 1/k."""
    system_blocks: int = 4
    turn_blocks: int = 4
    """Mean blocks that a turn adds, the answer before it included."""
    output_tokens: int = 200
    """Mean, exponentially distributed."""
    more_turns: float = 0.7
    """Share of requests that continue a conversation, if one is open."""
    block_tokens: int = 512


def synthetic(options: SyntheticConversations, seed: int = 0) -> Iterator[SimRequest]:
    """The requests that `options` describes; the same for the same seed."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(options.groups)]
    systems = [[block_name(-1 - group, i) for i in range(options.system_blocks)] for group in range(options.groups)]
    open_talks: list[tuple[str, list[BlockHash]]] = []
    ids = count()
    now_s = 0.0
    for number in range(options.requests):
        now_s += rng.expovariate(options.rate)
        if open_talks and rng.random() < options.more_turns:
            session, history = open_talks.pop(rng.randrange(len(open_talks)))
        else:
            session, history = f"talk-{number}", systems[rng.choices(range(options.groups), weights)[0]]
        added = 1 + int(rng.expovariate(1 / max(1, options.turn_blocks)))
        history = history + [block_name(0, next(ids)) for _ in range(added)]
        if len(history) * options.block_tokens < 100_000:
            open_talks.append((session, history))
        output = 1 + int(rng.expovariate(1 / options.output_tokens))
        tokens = len(history) * options.block_tokens - rng.randrange(options.block_tokens)
        yield SimRequest(number, now_s, tokens, output, history, session)


@dataclass(frozen=True)
class TurningMix:
    """Long prompts with short answers and short prompts with long answers, whose shares turn from 80:20 to 20:80 and back."""

    requests: int = 10_000
    rate: float = 4.0
    """Arrivals per second, Poisson."""
    period_s: float = 7200.0
    block_tokens: int = 512
    prompt_tokens: tuple[int, int] = (8192, 512)
    """Of each kind."""
    output_tokens: tuple[int, int] = (64, 3000)
    """Means, exponentially distributed."""


def turning(options: TurningMix, seed: int = 0) -> Iterator[SimRequest]:
    """The requests that `options` describes; no two share a block."""
    rng = random.Random(seed)
    ids = count()
    now_s = 0.0
    for number in range(options.requests):
        now_s += rng.expovariate(options.rate)
        kind = int(rng.random() >= share_of_first(now_s, options.period_s))
        tokens = options.prompt_tokens[kind]
        names = [block_name(0, next(ids)) for _ in range(-(-tokens // options.block_tokens))]
        output = 1 + int(rng.expovariate(1 / options.output_tokens[kind]))
        yield SimRequest(number, now_s, tokens, output, names)
