"""Parses Python literals as JSON values, without evaluating anything. Pure."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"""
    r"""|(?P<word>[A-Za-z]\w*)|(?P<mark>[\[\]{}(),:])|(?P<end>\Z))""",
    re.DOTALL,
)
_NO_ESCAPE = re.compile(r"""(?<!\\)((?:\\\\)*)\\(?![\\'"abfnrtv0-7xuUN])""")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_MAX_DEPTH = 64


def parse_literal(text: str) -> Any:
    """The value of a string, number, truth value, None, list, tuple or dict with strings as keys.

    Raises: ValueError for everything else.
    """
    literal = _Literal(text)
    value = literal.value(0)
    if literal.kind != "end":
        raise ValueError("text behind the literal")
    return value


class _Literal:
    """A text and its current token."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.kind: str | None = None
        self._token = ""
        self._next()

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise ValueError("not a literal")
        self._at, self.kind = found.end(), found.lastgroup
        self._token = found[found.lastgroup or 0]

    def value(self, depth: int) -> Any:
        """The value that begins with the current token; then the token behind it is current."""
        token, kind = self._token, self.kind
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        self._next()
        if kind == "string":
            value = _string(token)
            while self.kind == "string":
                value += _string(self._token)
                self._next()
            return value
        if kind == "number":
            return int(token) if token.lstrip("+-").isdecimal() else _finite(token)
        if kind == "word" and token in _WORDS:
            return _WORDS[token]
        if token == "{":
            return self._dict(depth)
        if token in ("[", "("):
            return self._list("]" if token == "[" else ")", depth)
        raise ValueError("not a literal")

    def _take(self, mark: str) -> bool:
        if self.kind != "mark" or self._token != mark:
            return False
        self._next()
        return True

    def _list(self, end: str, depth: int) -> Any:
        values: list[Any] = []
        comma = True
        while not self._take(end):
            if not comma:
                raise ValueError("a comma is missing")
            values.append(self.value(depth + 1))
            comma = self._take(",")
        return values[0] if end == ")" and len(values) == 1 and not comma else values

    def _dict(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        comma = True
        while not self._take("}"):
            key = self.value(depth + 1)
            if not comma or not isinstance(key, str) or not self._take(":"):
                raise ValueError("not a dict with strings as keys")
            members[key] = self.value(depth + 1)
            comma = self._take(",")
        return members


def _finite(token: str) -> float:
    number = float(token)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _string(token: str) -> str:
    if token[0] == '"':
        try:
            return str(json.loads(token, strict=False))
        except ValueError:
            pass
    # Line breaks, and backslashes that escape nothing, are taken as they are.
    token = _NO_ESCAPE.sub(r"\1\\\\", token.replace("\r", "\\r").replace("\n", "\\n"))
    try:
        return str(ast.literal_eval(token))  # one string token cannot contain code
    except (SyntaxError, ValueError):
        raise ValueError("not a string") from None
