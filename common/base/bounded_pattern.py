"""Regular expressions from files, in an engine without backtracking: no pattern and no text makes a match take long. Pure."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

_MAX_CHARS = 512


class PatternError(ValueError):
    """The pattern is malformed, too long or too complex, or uses what the engine does not have (look-around, back references)."""


@cache
def _bytes() -> LLTokenizer:
    """A tokenizer with a token for each byte."""
    return LLTokenizer("byte")


class BoundedPattern:
    """A pattern in the syntax of Rust's `regex` crate, which has that of Python's `re` without look-around.

    Raises: PatternError.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MAX_CHARS:
            raise PatternError(f"it has {len(pattern)} characters, more than {_MAX_CHARS}")
        self._matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_regex(pattern), log_level=0)
        self._check()

    def fullmatch(self, text: str) -> bool:
        """Whether it matches the whole text. Raises: PatternError if it is too complex for that."""
        data = list(text.encode())
        consumed = self._matcher.try_consume_tokens(data)
        self._check()
        found = consumed == len(data) and self._matcher.is_accepting()
        self._matcher.reset()
        return found

    def _check(self) -> None:
        if self._matcher.is_error():
            raise PatternError(" ".join(self._matcher.get_error().partition("\n<state>")[0].split())[:300])
