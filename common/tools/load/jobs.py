"""Jobs of a load run: what is sent and when. Pure: job i depends only on the plan and i, so processes share a run."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""


@dataclass(frozen=True)
class Job:
    """One request."""

    number: int
    prompt: list[int] | str
    output_tokens: int
    system: str = ""
    """Chat only: the system message, which is the shared prefix."""
    at_s: float | None = None
    """Time to send it, since the start; None: as soon as a worker is free."""


@dataclass(frozen=True)
class Synthetic:
    """Prompts that share prefixes: each is one of `prefixes` shared prefixes and a unique suffix.

    Token ids are drawn from the middle of the vocabulary, away from special tokens.
    """

    prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    vocab_size: int
    seed: int = 0
    text: bool = False
    """Use words, about one token each, instead of token ids."""

    def job(self, number: int, at_s: float | None = None) -> Job:
        """Job `number`; negative numbers are for warm-up: same prefixes, other suffixes."""
        which = random.Random(f"{self.seed} pick {number}").randrange(self.prefixes) if self.prefix_tokens else 0
        if self.text:
            system = _words(f"{self.seed} prefix {which}", self.prefix_tokens)
            return Job(
                number, _words(f"{self.seed} suffix {number}", self.suffix_tokens), self.output_tokens, system, at_s
            )
        prefix = draw_ids(f"{self.seed} prefix {which}", self.prefix_tokens, self.vocab_size)
        suffix = draw_ids(f"{self.seed} suffix {number}", self.suffix_tokens, self.vocab_size)
        return Job(number, [*prefix, *suffix], self.output_tokens, at_s=at_s)


@functools.lru_cache(maxsize=4096)
def draw_ids(key: str, count: int, vocab_size: int) -> tuple[int, ...]:
    """`count` token ids, the same for the same key in every process."""
    low, high = vocab_size // 10, max(vocab_size // 10 + 1, vocab_size * 9 // 10)
    return tuple(random.Random(key).choices(range(low, high), k=count))


_SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "ji", "ka", "lo", "mi", "no", "pe", "ra", "so", "tu", "ve")


@functools.lru_cache(maxsize=1024)
def _words(key: str, count: int) -> str:
    rng = random.Random(key)
    return " ".join("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(count))


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Endless arrival times with Gamma-distributed gaps of mean 1 / `rate` and shape `burstiness`.

    Shape 1 is a Poisson process; a lower one is burstier, a higher one more even.
    """
    rng, now_s = random.Random(f"{seed} arrivals"), 0.0
    while True:
        now_s += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield now_s


@dataclass(frozen=True)
class TraceEntry:
    """One line of a trace, not yet scaled."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(path: str) -> list[TraceEntry]:
    """Read JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids` of 512-token blocks.

    Raises: ConfigError that names the faulty line.
    """
    entries: list[TraceEntry] = []
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    entries.append(_entry(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not entries:
        raise ConfigError(f"the trace {path} is empty")
    entries.sort(key=lambda entry: entry.at_s)
    return entries


def _entry(line: str, place: str) -> TraceEntry:
    try:
        raw = json.loads(line)
        entry = TraceEntry(
            raw["timestamp"] / 1000, int(raw["input_length"]), int(raw["output_length"]), tuple(raw["hash_ids"])
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{place}: {type(error).__name__}: {error}") from error
    if not math.isfinite(entry.at_s):
        raise ConfigError(f"{place}: the timestamp {entry.at_s} is not a time")
    if len(entry.hash_ids) * TRACE_BLOCK < entry.input_tokens or entry.input_tokens < 1:
        raise ConfigError(f"{place}: {len(entry.hash_ids)} blocks do not hold {entry.input_tokens} tokens")
    return entry


@dataclass(frozen=True)
class Replay:
    """A trace scaled down: a 512-token block becomes 512 / `scale` token ids, which depend only on its hash id."""

    entries: Sequence[TraceEntry]
    scale: int
    rate_scale: float
    vocab_size: int
    seed: int = 0

    def job(self, number: int) -> Job:
        """The entry of this number."""
        entry = self.entries[number]
        block = TRACE_BLOCK // self.scale
        blocks = (draw_ids(f"{self.seed} block {hash_id}", block, self.vocab_size) for hash_id in entry.hash_ids)
        length = max(1, entry.input_tokens // self.scale)
        prompt = list(itertools.islice(itertools.chain.from_iterable(blocks), length))
        at_s = (entry.at_s - self.entries[0].at_s) / self.rate_scale
        return Job(number, prompt, max(1, entry.output_tokens // self.scale), at_s=at_s)
