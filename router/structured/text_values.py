"""The grammar of a parameter whose value is plain text between tags, as `router.output.parameter_value` reads it. Pure.

A string stands as it is; all other values are JSON. A text is a string if no other value that the schema allows looks so: where
strings and others are allowed, strings that look like one of them are left out.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from common.base.errors import BadRequest
from router.output.json_values import elements, listed_values, members, referred_schema
from router.output.parameter_value import ALL_KINDS, STRINGS_ONLY, allowed_kinds
from router.structured.lark_rules import ANYTHING
from router.structured.patterns import is_supported, without_look_ahead
from router.structured.relaxed import Relaxed

_MAX_DEPTH = 8
_LOOKS_LIKE_JSON = rf"[-+.0-9\[{{\s\"']{ANYTHING}|(true|false|null|True|False|None)\s*"
"""Strings that begin so may be read as another value."""
_FIRST_AND_LAST = re.compile(r"^(\^?)((?:[^\\$^]|\\.|\[\^)*)(\$?)$", re.DOTALL)
"""A pattern whose anchors stand at its ends."""


class TextValue(NamedTuple):
    """`texts`: the expression of a Lark terminal for the values that are plain text; None: there are none. `json_schema`: that of the values
    that are JSON; None: there are none."""

    texts: str | None
    json_schema: dict[str, Any] | None


def text_value(schema: Any, root: dict[str, Any], closing: str, relaxed: Relaxed | None) -> TextValue:
    """The values of a parameter with this schema. `closing`: the tag behind it, which no value contains.

    `relaxed`: notes the keywords that were left out; None: they are refused.
    Raises: BadRequest.
    """
    kinds = allowed_kinds(schema, root)
    constants = listed_values(referred_schema(schema, root))
    if constants is not None and "string" in kinds:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in constants]
        return TextValue(" | ".join(json.dumps(text, ensure_ascii=False) for text in texts), None)
    words = [json.dumps(value) for value in (True, False, None) if _allows(schema, value, root)]
    if kinds == ALL_KINDS and referred_schema(schema, root).keys() <= {"title", "description", "default", "examples"}:
        return TextValue(f"/{ANYTHING}/ & ~/{ANYTHING}{_escaped(closing)}{ANYTHING}/", None)
    if "string" not in kinds:
        return TextValue(None, members(schema))
    texts = _Strings(root, relaxed).regex(schema, 0)
    without = f"{ANYTHING}{_escaped(closing)}{ANYTHING}"
    if kinds == STRINGS_ONLY:
        return TextValue(f"({texts}) & ~/{without}/", None)
    others = sorted(kinds - {"string", "null", "boolean"} - ({"integer"} if "number" in kinds else set()))
    texts = f"(({texts}) & ~/{_LOOKS_LIKE_JSON}/ & ~/{without}/)"
    plain = " | ".join([texts, *(f"/{word}/" for word in words)])
    return TextValue(plain, {"allOf": [schema, {"type": others}]} if others else None)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _allows(schema: Any, value: bool | None, root: dict[str, Any], depth: int = 0) -> bool:
    """Whether a schema allows a truth value or null."""
    found = referred_schema(schema, root)
    constants = listed_values(found)
    if ("null" if value is None else "boolean") not in allowed_kinds(found, root):
        return False
    if depth > _MAX_DEPTH or (constants is not None and not any(each is value for each in constants)):
        return False
    unions = [found[key] for key in ("anyOf", "oneOf") if isinstance(found.get(key), list)]
    return all(any(_allows(each, value, root, depth + 1) for each in union) for union in unions)


class _Strings:
    """The strings of schemas, as terms of Lark's terminals."""

    def __init__(self, root: dict[str, Any], relaxed: Relaxed | None) -> None:
        self._root = root
        self._relaxed = relaxed

    def regex(self, schema: Any, depth: int) -> str:
        """The strings that a schema allows. Raises: BadRequest."""
        found = referred_schema(schema, self._root)
        if depth > _MAX_DEPTH:
            self._leave_out("$ref")
            return f"/{ANYTHING}/"
        constants = listed_values(found)
        if constants is not None:
            texts = [each for each in constants if isinstance(each, str)]
            return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in texts)})" if texts else "/[^\\s\\S]/"
        terms = [self._length(found)] if found.keys() & {"minLength", "maxLength"} else []
        if isinstance(found.get("pattern"), str):
            terms += [term for each in without_look_ahead(found["pattern"]) if (term := self._pattern(each))]
        if "format" in found:
            self._leave_out("format")
        for key in ("anyOf", "oneOf"):
            if isinstance(found.get(key), list):
                branches = [each for each in found[key] if "string" in allowed_kinds(each, self._root)]
                terms.append("(" + " | ".join(self.regex(each, depth + 1) for each in branches) + ")")
        terms += [self.regex(each, depth + 1) for each in elements(found.get("allOf"))]
        return " & ".join(terms) or f"/{ANYTHING}/"

    def _length(self, schema: Any) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return rf"/(.|\n){{{least},{most}}}/"

    def _pattern(self, pattern: str) -> str:
        parts = _FIRST_AND_LAST.match(pattern)
        if parts is None or not is_supported(pattern):
            self._leave_out("pattern")
            return ""
        before, after = "" if parts[1] else ANYTHING, "" if parts[3] else ANYTHING
        inner = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", parts[2])
        return f"/{before}({inner}){after}/"

    def _leave_out(self, keyword: str) -> None:
        if self._relaxed is None:
            raise BadRequest(f"this model's format cannot hold {keyword} of a text", param="tools")
        self._relaxed.note([keyword])
