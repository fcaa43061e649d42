"""Keeps special tokens that a client typed inside a message from becoming control tokens. Pure.

A chat template writes special tokens around the client's strings, and the tokenizer recognizes them by their text: it
would also recognize those in the strings. So each occurrence there gets a separator behind its first character before the
template is rendered, and the rendered text is encoded in parts, cut at the separators. Text without special tokens is
encoded as one part, exactly as Hugging Face does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

SEPARATOR = "\ufdd0"
"""A code point that Unicode reserves for use within programs. In a text with typed special tokens, one from the client is
dropped."""


class TypedTokens:
    """Finds the special tokens of one tokenizer in a client's strings."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        longer = (token for token in special_tokens if len(token) > 1)
        starts = [f"{re.escape(first)}(?={_any_of(rests)})" for first, rests in _by_first(longer).items()]
        self._starts = re.compile("|".join(starts)) if starts else None

    def separated(self, value: Any) -> Any:
        """`value`, a JSON value, with separators in the special tokens of all its strings."""
        if self._starts is None:
            return value
        if isinstance(value, str):
            return self._starts.sub(rf"\g<0>{SEPARATOR}", value)
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            return type(members)((self.separated(key), self.separated(member)) for key, member in members.items())
        if isinstance(value, list):
            return [self.separated(item) for item in cast("list[Any]", value)]
        return value


def _by_first(texts: Iterable[str]) -> dict[str, set[str]]:
    """By first character: what follows it."""
    rests: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        rests[text[0]].add(text[1:])
    return rests


def _any_of(texts: set[str]) -> str:
    """A regular expression for the beginnings of texts. It is a tree, so that matching takes no longer with many texts."""
    if "" in texts:
        return ""
    ways = [re.escape(first) + _any_of(rests) for first, rests in sorted(_by_first(texts).items())]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
