"""JSON schemas as grammars. Pure.

White space between a JSON text's tokens is bounded: a model cannot fill its answer with it. llguidance refuses most keywords
that it does not implement, by name; those that it would ignore, or hold only in part, are refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher

from common.base.errors import BadRequest
from common.engine.grammar.compile import MAX_SOURCE_CHARS
from router.structured.equivalents import Equivalents, referred
from router.structured.number_bounds import hold_numbers

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r" |\n[ \t]{0,20}"
"""A regular expression for the white space that may be between two tokens: a space, or a line break and an indentation."""
MAX_SCHEMA_DEPTH = 64
MAX_WHITESPACE_CHARS = 200
_ESCAPES = '"\\bfnrt'
"""Behind a backslash. With `\\u00f6`, which stands for control characters, names could be spelt so that llguidance takes listed
properties for further ones, which may have any value."""

_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]|\x7f")
"""A control character in JSON that has no shorter escape, or DEL, which llguidance escapes, too."""
_NEGATED = re.compile(r"\\.|\[\^[]-]?", re.DOTALL)
"""The beginning of a negated class, `[^`, maybe with a bracket or hyphen as its first character; or anything escaped."""
_REAL_DAYS = (
    r"^([0-9]{4}-(0[13-9]|1[0-2])|[0-9]{4}-02-([01][0-9]|2[0-8])|"
    r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
"""The beginning of a date. llguidance accepts 29 February in every year."""
_IGNORED = ("divisibleBy", "disallow", "extends", "x-guidance")
_SCHEMA = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

Schema = dict[str, Any]


def json_schema_grammar(schema: Schema, whitespace: str | None = WHITESPACE) -> str:
    """A grammar for the JSON texts that a schema describes, as `Grammar.source`. whitespace: None for no white space.

    Raises: BadRequest for what is not supported.
    """
    checked, escapes = _checked(schema)
    try:
        return LLMatcher.grammar_from_json_schema(checked, overrides=_options(whitespace, escapes))
    except ValueError as error:  # it reads less of JSON than Python does: at most 128 levels, no infinite numbers
        raise BadRequest(f"the schema cannot be read: {error}") from error


def embedded_schema(schema: Schema) -> str:
    """A term for the JSON texts that a schema describes, to be used in the rules of a Lark grammar.

    Raises: BadRequest for what is not supported.
    """
    checked, escapes = _checked(schema)
    return "%json " + json.dumps({**json.loads(checked), "x-guidance": _options(WHITESPACE, escapes)})


def without_further_properties(schema: Schema) -> Schema:
    """The schema with `additionalProperties: false` in every object that lists properties and does not say."""
    closed: Schema = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            closed[key] = {name: _closed(each) for name, each in named.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            closed[key] = [_closed(each) for each in cast("list[Any]", value)]
        else:
            closed[key] = _closed(value) if key in _SCHEMA else value
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _closed(value: Any) -> Any:
    return without_further_properties(cast("Schema", value)) if isinstance(value, dict) else value


def _options(whitespace: str | None, escapes: str) -> JsonCompileOptions:
    """All that a schema's own `x-guidance` could say otherwise."""
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": escapes}
    if whitespace is None:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": whitespace}


def _checked(schema: Schema) -> tuple[str, str]:
    """The schema as JSON, and the escapes that strings may have. Raises: BadRequest."""
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_SOURCE_CHARS:
        raise BadRequest(f"the schema has {len(text)} characters, more than {MAX_SOURCE_CHARS}")
    schema = json.loads(text)
    unions, equivalents, one_spelling = _Unions(schema), Equivalents(schema), False
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise BadRequest(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
        if isinstance(node, dict):
            found = cast("Schema", node)
            equivalents.use(found)
            _check_keywords(found)
            listed = found.get("properties") or found.get("patternProperties")
            one_spelling |= bool(listed) and found.get("additionalProperties") is not False
            if found.get("format") in ("date", "date-time"):
                _add_pattern(found, _REAL_DAYS)
            if isinstance(found.get("pattern"), str):
                found["pattern"] = _NEGATED.sub(_without_nul, found["pattern"])
            if isinstance(named := found.get("patternProperties"), dict):
                patterns = cast("dict[str, Any]", named)
                found["patternProperties"] = {_NEGATED.sub(_without_nul, key): each for key, each in patterns.items()}
            if "anyOf" not in found and unions.are_told_apart(found.get("oneOf")):
                _admit_any_branch(found, schema)
            stack += [(each, depth + 1) for each in _subschemas(found)]
    escapes = _ESCAPES if one_spelling and not _CONTROL.search(text) else _ESCAPES + "u"
    return json.dumps(schema, ensure_ascii=False), escapes


def _add_pattern(schema: Schema, pattern: str) -> None:
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append({"pattern": pattern})


def _without_nul(found: re.Match[str]) -> str:
    """A negated class of a pattern that excludes NUL, too: llguidance takes one with all control characters for one that has
    quotes and backslashes."""
    begin = found[0]
    return begin if begin[0] == "\\" else "[^\\x00" + (f"\\{begin[2]}" if len(begin) == 3 else "")


class _Unions:
    """The `oneOf` of one schema. Each object and each set of them is looked through once, however often the schema refers to it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._constants: dict[int, tuple[Schema, dict[str, str]]] = {}
        """By `id` of the object, which stays alive here."""
        self._told_apart: dict[frozenset[int], bool] = {}

    def are_told_apart(self, branches: Any) -> bool:
        """Whether a required property has another constant in each branch of a `oneOf`, as in pydantic's discriminated unions.
        llguidance does not see it through a `$ref`.
        """
        if not isinstance(branches, list):
            return False
        found = [referred(branch, self._root) for branch in cast("list[Any]", branches)]
        key = frozenset(map(id, found))
        if not key or len(key) < len(found):
            return False
        if key not in self._told_apart:
            self._told_apart[key] = self._differ(found)
        return self._told_apart[key]

    def _differ(self, branches: list[Schema]) -> bool:
        found = [self._constants_of(branch) for branch in branches]
        names = set(found[0]).intersection(*found[1:])
        return any(len({constants[name] for constants in found}) == len(found) for name in names)

    def _constants_of(self, branch: Schema) -> dict[str, str]:
        if id(branch) not in self._constants:
            self._constants[id(branch)] = branch, _constants(branch)
        return self._constants[id(branch)][1]


def _admit_any_branch(schema: Schema, root: Schema) -> None:
    """Turn a `oneOf` whose branches exclude each other into `anyOf`. A value that is no object matches every branch that does
    not name its type, and so more than one: only objects remain then."""
    branches = [referred(branch, root) for branch in schema["oneOf"]]
    kinds = schema.get("type", "object")
    if len(branches) > 1 and any(branch.get("type") != "object" for branch in branches):
        if "object" not in (cast("list[Any]", kinds) if isinstance(kinds, list) else [kinds]):
            return
        schema["type"] = "object"
    schema["anyOf"] = schema.pop("oneOf")


def _constants(schema: Schema) -> dict[str, str]:
    """The required properties that are constants."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    names = {name for name in cast("list[Any]", required) if isinstance(name, str)}
    named = cast("dict[str, Any]", properties).items()
    return {name: each["const"] for name, each in named if name in names and _is_constant(each)}


def _is_constant(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(cast("Schema", schema).get("const"), str)


def _subschemas(schema: Schema) -> Iterator[Any]:
    for key in _NAMED_SCHEMAS:
        named = schema.get(key)
        if isinstance(named, dict):
            yield from cast("dict[str, Any]", named).values()
    for key in _SCHEMAS:
        listed = schema.get(key)
        if isinstance(listed, list):
            yield from cast("list[Any]", listed)
    for key in _SCHEMA:
        if key in schema:
            yield schema[key]


def _check_keywords(schema: Schema) -> None:
    for key in _IGNORED:
        if key in schema:
            raise BadRequest(f"the schema's keyword {key} is not supported")
    hold_numbers(schema)
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise BadRequest("the schema's keyword required must be a list of names")
    least = schema.get("minProperties", 0)
    open_ended = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if open_ended and isinstance(least, int) and least > len(set(map(str, cast("list[Any]", required)))):
        # A property that occurs twice would be counted twice.
        raise BadRequest(
            "the schema's keyword minProperties is not supported beyond the number of required properties, except with "
            "additionalProperties=false"
        )
