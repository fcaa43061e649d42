"""Tables and the documents' section from the samples of a comparison: medians, ratios, shares of bounds. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.peers.rows import BATCH, BATCH_PROMPT, BATCH_TOKENS, LONG_COUNT, LONG_EVERY_S, STREAMS
from bench.results import number
from bench.shape import Shape

OURS = "kvrelay"
Rounds = Sequence[Mapping[str, float]]
"""Figures of each round of one system, by line; a line that was not measured is missing."""


@dataclass(frozen=True)
class Limits:
    """What the machine reached in one round: memory read in bytes/s, products of bfloat16 or float32 in FLOP/s."""

    read: float
    product: float

    def step_s(self, shape: Shape, rows: int) -> float:
        """Shortest decode step of `rows` sequences: weights read once, or their products, whichever takes longer."""
        products = 2.0 * rows * shape.weight_bytes_per_token(element_bytes=1)
        return max(shape.weight_bytes_per_step(rows) / self.read, products / self.product)

    def prefill_s(self, shape: Shape, tokens: int) -> float:
        """Shortest time of a prompt's arithmetic."""
        return shape.prefill_flop(tokens) / self.product

    def batch_s(self, shape: Shape) -> float:
        """Shortest time of the whole burst."""
        decode_s = (BATCH_TOKENS - 1) * self.step_s(shape, BATCH)
        return BATCH * self.prefill_s(shape, BATCH_PROMPT) + decode_s


Bound = Callable[[Limits, Shape], float]


@dataclass(frozen=True)
class Line:
    """One line of the table. `bound`: the best value that the limits allow, if that can be said."""

    key: str
    title: str
    unit: str
    lower_is_better: bool = False
    bound: Bound | None = None
    scale: float = 1.0
    """From seconds or shares to the unit."""

    def better(self, ours: float, theirs: float) -> float:
        """How many times better `ours` is."""
        over, under = (theirs, ours) if self.lower_is_better else (ours, theirs)
        return over / under if under else math.nan


_BURST = f"{BATCH} x ({BATCH_PROMPT} -> {BATCH_TOKENS})"
_LONG_S = LONG_COUNT * LONG_EVERY_S
LINES = (
    Line("one_stream", "one stream", "tokens/s", bound=lambda m, s: 1 / m.step_s(s, 1)),
    Line("ttft_512", "TTFT of 512 tokens", "ms", True, lambda m, s: m.prefill_s(s, 512), 1e3),
    Line("ttft_2048", "TTFT of 2,048 tokens", "ms", True, lambda m, s: m.prefill_s(s, 2048), 1e3),
    Line("batch", _BURST, "tokens/s", bound=lambda m, s: BATCH * BATCH_TOKENS / m.batch_s(s)),
    Line(
        "batch_prefill",
        f"{_BURST}: prefill",
        "tokens/s",
        bound=lambda m, s: BATCH_PROMPT / m.prefill_s(s, BATCH_PROMPT),
    ),
    Line("batch_decode", f"{_BURST}: decode", "tokens/s", bound=lambda m, s: BATCH / m.step_s(s, BATCH)),
    Line("batch_itl_p50", f"{_BURST}: ITL p50", "ms", True, scale=1e3),
    Line("batch_itl_p99", f"{_BURST}: ITL p99", "ms", True, scale=1e3),
    Line("itl_p99_quiet", f"{STREAMS} streams: ITL p99, quiet", "ms", True, scale=1e3),
    Line("itl_p99_disturbed", f"{STREAMS} streams: ITL p99, 4k prompts every 2 s", "ms", True, scale=1e3),
    Line("itl_p99_growth", f"{STREAMS} streams: ITL p99, disturbed / quiet", "x", True),
    Line("answered", f"4k prompts answered in {_LONG_S:g} s", "%", scale=100),
    Line("long_ttft_quiet", "TTFT of 4k prompts, quiet", "ms", True, scale=1e3),
    Line("long_ttft", "TTFT of 4k prompts, beside the streams", "ms", True, scale=1e3),
    Line("long_ttft_growth", "TTFT of 4k prompts, beside the streams / quiet", "x", True),
)


def typical(rounds: Rounds, key: str) -> float:
    """Median over the rounds that have this line; NaN if none has."""
    return _median([figures.get(key, math.nan) for figures in rounds])


def ratio(line: Line, ours: Rounds, theirs: Rounds) -> float:
    """How many times better ours is: the median of the ratios within each round, as the machine's speed drifts."""
    ratios = [
        line.better(own[line.key], other[line.key])
        for own, other in zip(ours, theirs, strict=False)
        if line.key in own and line.key in other
    ]
    return _median(ratios)


def share_of_bound(line: Line, rounds: Rounds, limits: Sequence[Limits], shape: Shape) -> float:
    """Median over the rounds of how much of the bound of the same round was reached; NaN without a bound."""
    if line.bound is None:
        return math.nan
    shares = [
        1 / line.better(line.bound(machine, shape), figures[line.key])
        for figures, machine in zip(rounds, limits, strict=False)
        if line.key in figures
    ]
    return _median(shares)


def _median(values: Sequence[float]) -> float:
    """Of those that are numbers, infinity among them; NaN if there are none."""
    numbers = [value for value in values if not math.isnan(value)]
    return statistics.median(numbers) if numbers else math.nan


def table(
    shape: Shape, limits: Sequence[Limits], rounds: Mapping[str, Rounds], titles: Mapping[str, str]
) -> list[list[str]]:
    """Header and rows: our figure, its share of the bound, and every peer's figure with our ratio to it."""
    ours = rounds.get(OURS, [])
    peers = [name for name in rounds if name != OURS and any(rounds[name])]
    rows = [[shape.name, OURS, "of its bound", *(titles[name] for name in peers)]]
    for line in LINES:
        if all(math.isnan(typical(found, line.key)) for found in rounds.values()):
            continue
        share = share_of_bound(line, ours, limits, shape)
        row = [f"{line.title}, {line.unit}", _figure(line, ours), "" if math.isnan(share) else f"{share:.0%}"]
        for name in peers:
            times = ratio(line, ours, rounds[name])
            row.append(_figure(line, rounds[name]) + (f" ({times:.2f} x)" if math.isfinite(times) else ""))
        rows.append(row)
    return rows


def _figure(line: Line, rounds: Rounds) -> str:
    value = typical(rounds, line.key)
    if math.isinf(value):
        return "none answered"
    return "" if math.isnan(value) else number(line.scale * value)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of the documents; the first row is its header."""
    header, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([header, f"|{'---|' * len(rows[0])}", *body])


def bounds_in_words(limits: Sequence[Limits]) -> str:
    """The limits of all rounds, for the text above the tables."""
    read, product = ([getattr(machine, name) / 1e9 for machine in limits] for name in ("read", "product"))
    return (
        f"memory read {min(read):.0f} to {max(read):.0f} GB/s, "
        f"the faster of bfloat16 and float32 products {min(product):.0f} to {max(product):.0f} GFLOP/s"
    )
