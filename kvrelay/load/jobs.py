"""Jobs of a load run: what is sent and when. Pure: job i depends only on the plan and i, so processes share a run."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadJob:
    """One request."""

    number: int
    prompt: list[int] | str
    output_tokens: int
    system: str = ""
    """Chat only: the system message, which is the shared prefix."""
    at_s: float | None = None
    """Time to send it, since the start; None: as soon as a worker is free."""


@dataclass(frozen=True)
class SyntheticPrompts:
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
    longest_tokens: int = 0
    """Suffixes have log-uniform lengths between `suffix_tokens` and this; 0: all have `suffix_tokens`."""

    def job(self, number: int, at_s: float | None = None) -> LoadJob:
        """Job `number`; negative numbers are for warm-up: same prefixes, other suffixes."""
        count = self._suffix_length(number)
        if self.text:
            suffix = fresh_words(f"{self.seed} suffix {number}", count)
            return LoadJob(number, suffix, self.output_tokens, self.system(number), at_s)
        prefix = shared_ids(f"{self.seed} prefix {self._which(number)}", self.prefix_tokens, self.vocab_size)
        suffix = fresh_ids(f"{self.seed} suffix {number}", count, self.vocab_size)
        return LoadJob(number, [*prefix, *suffix], self.output_tokens, at_s=at_s)

    def system(self, number: int) -> str:
        """The shared prefix of job `number` as words."""
        return shared_words(f"{self.seed} prefix {self._which(number)}", self.prefix_tokens)

    def _which(self, number: int) -> int:
        return random.Random(f"{self.seed} pick {number}").randrange(self.prefixes) if self.prefix_tokens else 0

    def _suffix_length(self, number: int) -> int:
        if not self.longest_tokens:
            return self.suffix_tokens
        low, high = math.log(max(1, self.suffix_tokens)), math.log(self.longest_tokens)
        return round(math.exp(random.Random(f"{self.seed} length {number}").uniform(low, high)))


def fresh_ids(key: str, count: int, vocab_size: int) -> tuple[int, ...]:
    """`count` token ids, the same for the same key in every process."""
    low, high = vocab_size // 10, max(vocab_size // 10 + 1, vocab_size * 9 // 10)
    return tuple(random.Random(key).choices(range(low, high), k=count))


shared_ids = functools.lru_cache(maxsize=4096)(fresh_ids)
"""`fresh_ids` with a cache, for keys that are used again."""

_SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "ji", "ka", "lo", "mi", "no", "pe", "ra", "so", "tu", "ve")


def fresh_words(key: str, count: int) -> str:
    """`count` words, the same for the same key in every process."""
    rng = random.Random(key)
    return " ".join("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(count))


shared_words = functools.lru_cache(maxsize=1024)(fresh_words)
"""`fresh_words` with a cache, for keys that are used again."""
