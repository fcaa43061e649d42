"""Parses Python literals as JSON, without evaluating anything. Pure."""

from __future__ import annotations

import ast
import json
import re

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<number>[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"""
    r"""|(?P<word>[A-Za-z]\w*)|(?P<mark>[\[\]{}(),:])|(?P<end>\Z))""",
    re.DOTALL,
)
_NO_ESCAPE = re.compile(r"""(?<!\\)((?:\\\\)*)\\(?![\\'"abfnrtv0-7xuUN])""")
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_MAX_DEPTH = 64


def literal_json(text: str) -> str:
    """A string, number, truth value, None, list, tuple or dict with strings as keys, as JSON. Numbers keep their digits.

    Raises: ValueError for everything else.
    """
    literal = _Literal(text)
    value = literal.json(0)
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

    def json(self, depth: int) -> str:
        """The value that begins with the current token, as JSON; then the token behind it is current."""
        token, kind = self._token, self.kind
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        self._next()
        if kind == "string":
            return json.dumps(self._rest_of_string(token), ensure_ascii=False)
        if kind == "number":
            return _number(token)
        if kind == "word" and token in _WORDS:
            return _WORDS[token]
        if token == "{":
            return self._dict(depth)
        if token in ("[", "("):
            return self._list("]" if token == "[" else ")", depth)
        raise ValueError("not a literal")

    def _rest_of_string(self, token: str) -> str:
        value = _string(token)
        while self.kind == "string":
            value += _string(self._token)
            self._next()
        return value

    def _take(self, mark: str) -> bool:
        if self.kind != "mark" or self._token != mark:
            return False
        self._next()
        return True

    def _list(self, end: str, depth: int) -> str:
        values: list[str] = []
        comma = True
        while not self._take(end):
            if not comma:
                raise ValueError("a comma is missing")
            values.append(self.json(depth + 1))
            comma = self._take(",")
        return values[0] if end == ")" and len(values) == 1 and not comma else f"[{', '.join(values)}]"

    def _dict(self, depth: int) -> str:
        members: dict[str, str] = {}
        comma = True
        while not self._take("}"):
            key = self.json(depth + 1)
            if not comma or not key.startswith('"') or not self._take(":"):
                raise ValueError("not a dict with strings as keys")
            members[key] = self.json(depth + 1)
            comma = self._take(",")
        return f"{{{', '.join(f'{key}: {value}' for key, value in members.items())}}}"


def _number(token: str) -> str:
    """The number as JSON, which has no plus before it, no zeros before its digits, and digits on both sides of a point."""
    sign = "-" if token.startswith("-") else ""
    whole, exponent, power = token.lstrip("+-").lower().partition("e")
    digits, point, decimals = whole.partition(".")
    return f"{sign}{digits.lstrip('0') or '0'}{point}{decimals or (point and '0')}{exponent}{power}"


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
