"""JSON schemas as grammars. Pure.

White space between a JSON text's tokens is bounded: a model cannot fill its answer with it. llguidance refuses most keywords
that it does not implement, by name; those that it would ignore, or hold only in part, are refused here. With a `Relaxed`, such
keywords are left out instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from common.base.errors import BadRequest
from common.engine.grammar.compile import LIMITS, MAX_SOURCE_CHARS
from router.output.json_values import elements, members, referred_schema, types_of
from router.structured.equivalents import Equivalents
from router.structured.number_bounds import hold_numbers
from router.structured.relaxed import Relaxed

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


def json_schema_grammar(schema: Schema, whitespace: str | None = WHITESPACE, relaxed: Relaxed | None = None) -> str:
    """A grammar for the JSON texts that a schema describes, as `Grammar.source`. whitespace: None for no white space.

    `relaxed`: notes the keywords that were left out; None: they are refused.
    Raises: BadRequest for what is not supported.
    """
    checked, options = _checked(schema, whitespace, relaxed)
    try:
        return LLMatcher.grammar_from_json_schema(checked, overrides=options)
    except ValueError as error:  # it reads less of JSON than Python does: at most 128 levels, no infinite numbers
        raise BadRequest(f"the schema cannot be read: {error}") from error


def embedded_schema(schema: Schema, relaxed: Relaxed | None = None) -> str:
    """A term for the JSON texts that a schema describes, to be used in the rules of a Lark grammar. `relaxed`: as above.

    Raises: BadRequest for what is not supported.
    """
    checked, options = _checked(schema, WHITESPACE, relaxed)
    return "%json " + json.dumps({**json.loads(checked), "x-guidance": options})


def without_further_properties(schema: Schema) -> Schema:
    """The schema with `additionalProperties: false` in every object that lists properties and does not say."""
    closed: Schema = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            closed[key] = {name: _closed(each) for name, each in members(value).items()}
        elif key in _SCHEMAS and isinstance(value, list):
            closed[key] = [_closed(each) for each in elements(value)]
        else:
            closed[key] = _closed(value) if key in _SCHEMA else value
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _closed(value: Any) -> Any:
    return without_further_properties(members(value)) if isinstance(value, dict) else value


def _options(whitespace: str | None, escapes: str) -> JsonCompileOptions:
    """All that a schema's own `x-guidance` could say otherwise."""
    options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": escapes}
    if whitespace is None:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": whitespace}


def _checked(schema: Schema, whitespace: str | None, relaxed: Relaxed | None) -> tuple[str, JsonCompileOptions]:
    """The schema as JSON, and llguidance's options for it. Raises: BadRequest."""
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
            found = members(node)
            if "anyOf" not in found and unions.are_told_apart(found.get("oneOf")):
                _admit_any_branch(found, schema)
            equivalents.use(found)
            if relaxed is not None:
                relaxed.relax(found, _most_required(found))
            _check_keywords(found)
            listed = found.get("properties") or found.get("patternProperties")
            one_spelling |= bool(listed) and found.get("additionalProperties") is not False
            if found.get("format") in ("date", "date-time"):
                _add_pattern(found, _REAL_DAYS)
            if isinstance(found.get("pattern"), str):
                found["pattern"] = _NEGATED.sub(_without_nul, found["pattern"])
            if patterns := members(found.get("patternProperties")):
                found["patternProperties"] = {_NEGATED.sub(_without_nul, key): each for key, each in patterns.items()}
            stack += [(each, depth + 1) for each in _subschemas(found)]
    options = _options(whitespace, _ESCAPES if one_spelling and not _CONTROL.search(text) else _ESCAPES + "u")
    checked = json.dumps(schema, ensure_ascii=False)
    if relaxed is not None and '"oneOf"' in checked and _refuses_one_of(checked, options):
        options["coerce_one_of"] = True
        relaxed.note(["oneOf"])
    return checked, options


def _refuses_one_of(schema: str, options: JsonCompileOptions) -> bool:
    """Whether branches of a `oneOf` may overlap, as far as llguidance can see."""
    try:
        source = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError:
        return False
    return "oneOf" in LLMatcher.validate_grammar(source, limits=LIMITS)


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
        """Whether a property has another constant in each branch of a `oneOf`, as in pydantic's discriminated unions; it is
        required then, also where it has a default. llguidance does not see it through a `$ref`.
        """
        found = [referred_schema(branch, self._root) for branch in elements(branches)]
        key = frozenset(map(id, found))
        if not key or len(key) < len(found):
            return False
        if key not in self._told_apart:
            self._told_apart[key] = self._differ(found)
        return self._told_apart[key]

    def _differ(self, branches: list[Schema]) -> bool:
        found = [self._constants_of(branch) for branch in branches]
        names = sorted(set(found[0]).intersection(*found[1:]))
        tags = [name for name in names if len({constants[name] for constants in found}) == len(found)]
        if tags and not any(all(tag in elements(branch.get("required")) for branch in branches) for tag in tags):
            for branch in branches:
                required = elements(branch.get("required"))
                branch["required"] = [*required, *({tags[0]} - {*required})]
        return bool(tags)

    def _constants_of(self, branch: Schema) -> dict[str, str]:
        if id(branch) not in self._constants:
            self._constants[id(branch)] = branch, _constants(branch)
        return self._constants[id(branch)][1]


def _admit_any_branch(schema: Schema, root: Schema) -> None:
    """Turn a `oneOf` whose branches exclude each other into `anyOf`. A value that is no object matches every branch that does
    not name its type, and so more than one: only objects remain then."""
    branches = [referred_schema(branch, root) for branch in schema["oneOf"]]
    if len(branches) > 1 and any(branch.get("type") != "object" for branch in branches):
        if "object" not in types_of(schema, "object"):
            return
        schema["type"] = "object"
    schema["anyOf"] = schema.pop("oneOf")


def _constants(schema: Schema) -> dict[str, str]:
    """The properties that are constants."""
    named = members(schema.get("properties")).items()
    return {name: each["const"] for name, each in named if isinstance(members(each).get("const"), str)}


def _subschemas(schema: Schema) -> Iterator[Any]:
    for key in _NAMED_SCHEMAS:
        yield from members(schema.get(key)).values()
    for key in _SCHEMAS:
        yield from elements(schema.get(key))
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
    least, most = schema.get("minProperties", 0), _most_required(schema)
    if most is not None and isinstance(least, int) and least > most:
        raise BadRequest(
            "the schema's keyword minProperties is not supported beyond one more than the number of required properties, except "
            "with additionalProperties=false"
        )


def _most_required(schema: Schema) -> int | None:
    """The largest `minProperties` that can be held: a further property that occurs twice would be counted twice. None: any."""
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        return None
    return 1 + len(set(map(str, elements(schema.get("required")))))
