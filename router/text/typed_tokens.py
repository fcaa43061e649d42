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
        rests: dict[str, list[str]] = defaultdict(list)
        for token in sorted(special_tokens):
            if len(token) > 1:
                rests[token[0]].append(token[1:])
        starts = [f"{re.escape(first)}(?={'|'.join(map(re.escape, rest))})" for first, rest in rests.items()]
        self._starts = re.compile("|".join(starts)) if starts else None

    def separated(self, value: Any) -> Any:
        """`value`, a JSON value, with separators in the special tokens of all its strings."""
        if self._starts is None:
            return value
        if isinstance(value, str):
            return self._starts.sub(_separate, value)
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            return type(members)((self.separated(key), self.separated(member)) for key, member in members.items())
        if isinstance(value, list):
            return [self.separated(item) for item in cast("list[Any]", value)]
        return value


def _separate(found: re.Match[str]) -> str:
    return found[0] + SEPARATOR
