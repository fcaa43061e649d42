"""Values of parameters that models write as plain text, such as `<parameter=KEY>VALUE</parameter>`, as JSON. Pure.

A text may be a string as it stands, or JSON: the schema of the parameter decides. A text that may be both is JSON.
"""

from __future__ import annotations

import json
from typing import Any

from router.output.json_values import elements, listed_values, referred_schema, types_of
from router.output.python_literal import literal_json

STRINGS_ONLY = frozenset({"string"})
ALL_KINDS = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_WORDS = ("True", "False", "None")
"""How templates write constants that are no strings."""
_MAX_DEPTH = 16
"""References and unions are followed this deep; what is deeper may have any kind."""


def value_json(text: str, schema: Any, root: Any) -> str:
    """A parameter's text as JSON of a kind that its schema allows. Text of no such kind is a string.

    `root`: the schema of all parameters, to which `schema` may refer.
    """
    kinds = allowed_kinds(schema, root)
    as_string = json.dumps(text, ensure_ascii=False)
    if kinds == STRINGS_ONLY or text in (listed_values(referred_schema(schema, root)) or ()):
        return as_string
    try:
        found = _json_or_literal(text.strip(), kinds)
    except (ValueError, RecursionError):
        return as_string
    kind = _kind_of(found)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return as_string if "string" in kinds and (kind == "string" or not fits) else found


def _json_or_literal(text: str, kinds: frozenset[str]) -> str:
    """Raises: ValueError, RecursionError."""
    try:
        json.loads(text, parse_constant=_no_number)
        return text
    except ValueError:
        if "string" in kinds and text not in _WORDS:
            raise
        return literal_json(text)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _kind_of(value: str) -> str:
    """The kind of a JSON value, by its text."""
    first = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}.get(value[0])
    return first or ("integer" if value.lstrip("-").isdigit() else "number")


def allowed_kinds(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """The kinds of values that a schema allows, at least."""
    found = referred_schema(schema, root)
    if not found or depth > _MAX_DEPTH:
        return ALL_KINDS
    kinds = ALL_KINDS
    if "type" in found:
        kinds &= set(map(str, types_of(found, "")))
    constants = listed_values(found)
    if constants is not None:
        kinds &= {_kind_of(json.dumps(each)) for each in constants}
    for key in ("anyOf", "oneOf"):
        if isinstance(found.get(key), list):
            kinds &= frozenset().union(*(allowed_kinds(each, root, depth + 1) for each in found[key]))
    for each in elements(found.get("allOf")):
        kinds &= allowed_kinds(each, root, depth + 1)
    return kinds
