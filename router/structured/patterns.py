"""Regular expressions of JSON schemas: which of them grammars hold, and look-aheads that other patterns mean. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from llguidance import LLMatcher

from common.engine.grammar.compile import LIMITS

_CLASS_ONLY = re.compile(r"\(\?!\^?\[((?:[^\]\\^]|\\.)+)\]\*\$\)")
"""Behind the beginning: the text may not consist of these characters only. pydantic's decimals have it."""
_DIGITS_AND_PLACES = re.compile(
    r"\(\?=\[\\d\.\]\{1,(\d{1,3})\}0\*\$\)\\d(?:\*|\{0,(\d{1,3})\})\\\.\\d(?:\*|\{0,(\d{1,3})\})0\*"
)
"""pydantic's decimals: a number of digits in all, before and behind the point."""
_MAX_DIGITS = 64
_MAX_KEPT_CHARS = 1000
"""Longer patterns are not remembered."""


def without_look_ahead(pattern: str) -> list[str]:
    """The patterns that all must match instead; itself if there is no look-ahead, or none that has an equivalent.

    A look-ahead at the beginning of a text is a pattern of its own.
    """
    found = [_DIGITS_AND_PLACES.sub(_digits_and_places, pattern)]
    while found[0].startswith("^(?"):
        rest = found[0].removeprefix("^")
        only = _CLASS_ONLY.match(rest)
        if only is not None:
            found[:1] = [f"^{rest[only.end() :]}", f"[^{only[1]}]"]
            continue
        end = _end_of_group(rest) if rest.startswith("(?=") else 0
        if not end:
            break
        found[:1] = [f"^{rest[end:]}", f"^(?:{rest[3 : end - 1]})"]
    return found


def _digits_and_places(found: re.Match[str]) -> str:
    """A decimal with a point, by the number of digits before it."""
    total = int(found[1]) - 1
    before, behind = (total if found[group] is None else int(found[group]) for group in (2, 3))
    if total > _MAX_DIGITS:
        return found[0]
    if before + behind <= total:
        return rf"\d{{0,{before}}}\.\d{{0,{behind}}}0*"
    ways = [rf"\d{{{digits}}}\.\d{{0,{min(behind, total - digits)}}}0*" for digits in range(min(before, total) + 1)]
    return f"(?:{'|'.join(ways)})"


def _end_of_group(pattern: str) -> int:
    """The position behind the group that begins a pattern; 0 if it does not end."""
    depth, in_class, at = 0, False, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            at += pattern.startswith("[]", at) + 2 * pattern.startswith("[^]", at)
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return at + 1
        at += 1
    return 0


def is_supported(pattern: str) -> bool:
    """Whether llguidance holds this pattern of a JSON schema."""
    return (_is_supported if len(pattern) <= _MAX_KEPT_CHARS else _is_supported.__wrapped__)(pattern)


@lru_cache(4096)
def _is_supported(pattern: str) -> bool:
    source = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(source, limits=LIMITS)
