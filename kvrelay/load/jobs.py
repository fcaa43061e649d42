"""Jobs of a load run: what is sent and when. Pure: job i depends only on the plan and i, so processes share a run."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

from kvrelay.load.plan import LoadPlan


@dataclass(frozen=True)
class LoadJob:
    """One request, or the session that it begins."""

    number: int
    prompt: list[int] | str
    output_tokens: int
    system: str = ""
    """Chat only: the system message, which is the shared prefix."""
    at_s: float | None = None
    """Time to send it, since the start; None: as soon as a worker is free."""
    pauses_s: tuple[float, ...] = ()
    """Sessions only: the pause before each later request."""


def synthetic_job(plan: LoadPlan, number: int, at_s: float | None = None) -> LoadJob:
    """Job `number` of a plan without a trace; negative numbers are for warm-up: same prefixes, other suffixes.

    Its prompt is one of the plan's shared prefixes and a unique suffix: words (about one token each) for chats, else token ids
    from the middle of the vocabulary, away from special tokens.
    """
    which = random.Random(f"{plan.seed} pick {number}").randrange(plan.prefixes) if plan.prefix_tokens else 0
    prefix, suffix = f"{plan.seed} prefix {which}", f"{plan.seed} suffix {number}"
    length = _suffix_length(plan, number)
    if plan.sends_chats:
        words, system = fresh_words(suffix, length), shared_words(prefix, plan.prefix_tokens)
        return LoadJob(number, words, plan.output_tokens, system, at_s, _pauses(plan, number))
    ids = [*shared_ids(prefix, plan.prefix_tokens, plan.vocab_size), *fresh_ids(suffix, length, plan.vocab_size)]
    return LoadJob(number, ids, plan.output_tokens, at_s=at_s)


def _suffix_length(plan: LoadPlan, number: int) -> int:
    if not plan.longest_tokens:
        return plan.suffix_tokens
    low, high = math.log(max(1, plan.suffix_tokens)), math.log(plan.longest_tokens)
    return round(math.exp(random.Random(f"{plan.seed} length {number}").uniform(low, high)))


def _pauses(plan: LoadPlan, number: int) -> tuple[float, ...]:
    """The pauses of a session, exponential with mean `think_s`."""
    rng = random.Random(f"{plan.seed} pauses {number}")
    return tuple(rng.expovariate(1 / plan.think_s) if plan.think_s else 0.0 for _ in range(plan.turns - 1))


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
