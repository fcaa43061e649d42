"""Keywords of JSON schemas that llguidance refuses, where others mean the same: pydantic and zod write them. Pure."""

from __future__ import annotations

import copy
import json
from typing import Any

from common.engine.grammar.compile import MAX_SOURCE_CHARS
from router.output.json_values import elements, members, referred_schema
from router.structured.conditions import use_unions
from router.structured.patterns import without_look_ahead

_ANY_TEXT = frozenset({"binary", "password", "path", "file-path", "directory-path"})
"""Formats of OpenAPI and pydantic that describe a string's purpose and restrict nothing."""
_FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "uuid", "regex"),
        *("email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "uri-template", "iri", "iri-reference", "json-pointer", "relative-json-pointer"),
    }
)
"""Formats that JSON Schema defines."""
_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_EQUAL_TO_FORMATS: dict[str, dict[str, Any]] = {
    "byte": {"pattern": _BASE64},
    "base64": {"pattern": _BASE64},
    "json-pointer": {"pattern": "^(/([^~/]|~[01])*)*$"},
    "ipvanyaddress": {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
    **{f"uuid{version}": {"format": "uuid", "pattern": f"^.{{14}}{version}"} for version in range(1, 9)},
}
"""Schemas that mean the same as a format of OpenAPI's, pydantic's or JSON Schema's."""
_NO_LIMITS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""Keywords with the values that every instance fits."""
_OF_NAMES = frozenset({"type", "enum", "title", "description"})
"""Keywords of a schema that only lists names."""

Schema = dict[str, Any]


class Equivalents:
    """Rewrites the schemas within one, `root`, to which they may refer. What lists of properties add is bounded."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._chars_left = MAX_SOURCE_CHARS

    def use(self, schema: Schema) -> None:
        """Change one schema, not those within it."""
        for key, values in _NO_LIMITS.items():
            if key in schema and any(schema[key] == each and type(schema[key]) is type(each) for each in values):
                del schema[key]
        if "not" in schema and (schema["not"] is True or schema["not"] == {}):  # no instance fits
            schema.clear()
            schema["enum"] = []
        use_unions(schema)
        _use_format(schema)
        _use_patterns(schema)
        self._use_numbers(schema)
        listed = not schema.keys().isdisjoint(("properties", "patternProperties"))
        if "propertyNames" in schema and not listed and self._chars_left >= 0:
            self._list_named(schema)

    def _use_numbers(self, schema: Schema) -> None:
        """Draft 4's exclusive bounds, which are truth values, as OpenAPI 3.0 and zod-to-json-schema write them."""
        if "draft-04" in str(self._root.get("$schema")):
            return
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
                schema[exclusive] = schema.pop(bound)

    def _list_named(self, schema: Schema) -> None:
        """List the properties of an object whose names are enumerated, or say their pattern."""
        given = schema["propertyNames"]
        described = referred_schema(given, self._root)
        pattern = _pattern_of_names(described) if described is given or len(members(given)) == 1 else None
        if pattern is not None:
            del schema["propertyNames"]
            schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
            schema["additionalProperties"] = False
            return
        names = elements(described.get("enum"))
        if not described.keys() <= _OF_NAMES or not names or not all(isinstance(name, str) for name in names):
            return
        if described is not given and len(given) > 1:  # what is beside the `$ref` may limit the names further
            return
        value = schema.get("additionalProperties", True)
        self._chars_left -= len(json.dumps(names)) + len(names) * len(json.dumps(value))
        if self._chars_left >= 0:
            schema["properties"] = {name: copy.deepcopy(value) for name in names}
            schema["additionalProperties"] = False
            del schema["propertyNames"]


def _pattern_of_names(described: Schema) -> str | None:
    """The pattern of a schema of names that has nothing else, or limits of their length; None: it has more."""
    kept = {key: value for key, value in described.items() if key not in ("type", "title", "description", "$comment")}
    if described.get("type", "string") != "string" or not kept:
        return None
    if kept.keys() == {"pattern"} and isinstance(kept["pattern"], str):
        return kept["pattern"]
    least, most = kept.get("minLength", 0), kept.get("maxLength", "")
    if kept.keys() <= {"minLength", "maxLength"} and type(least) is int and (most == "" or type(most) is int):
        return rf"^[\s\S]{{{least},{most}}}$"
    return None


def _use_patterns(schema: Schema) -> None:
    """Patterns without look-aheads where they mean the same."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"], *others = without_look_ahead(schema["pattern"])
        if others and isinstance(schema.setdefault("allOf", []), list):
            schema["allOf"] += [{"pattern": each} for each in others]


def _use_format(schema: Schema) -> None:
    """Replace a format by what means the same; drop one that any string has, or that is none of JSON Schema's and said by a pattern, too."""
    kind = schema.get("format")
    if isinstance(kind, str) and kind in _EQUAL_TO_FORMATS and isinstance(schema.setdefault("allOf", []), list):
        del schema["format"]
        schema["allOf"].append(copy.deepcopy(_EQUAL_TO_FORMATS[kind]))
        return
    if not isinstance(kind, str) or kind in _FORMATS:
        return
    if kind in _ANY_TEXT or any("pattern" in members(part) for part in (schema, *elements(schema.get("allOf")))):
        del schema["format"]
