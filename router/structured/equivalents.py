"""Keywords of JSON schemas that llguidance refuses, where others mean the same: pydantic and zod write them. Pure."""

from __future__ import annotations

import copy
import json
from typing import Any, cast

from common.engine.grammar.compile import MAX_SOURCE_CHARS

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
        _drop_format(schema)
        listed = not schema.keys().isdisjoint(("properties", "patternProperties"))
        if "propertyNames" in schema and not listed and self._chars_left >= 0:
            self._list_named(schema)

    def _list_named(self, schema: Schema) -> None:
        """List the properties of an object whose names are enumerated."""
        given = schema["propertyNames"]
        described = referred(given, self._root)
        names: list[Any] = described["enum"] if isinstance(described.get("enum"), list) else []
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


def _drop_format(schema: Schema) -> None:
    """Drop a format that any string has, or that is none of JSON Schema's and said by a pattern, too."""
    kind, further = schema.get("format"), schema.get("allOf")
    if not isinstance(kind, str) or kind in _FORMATS:
        return
    parts = [schema, *(cast("list[Any]", further) if isinstance(further, list) else [])]
    if kind in _ANY_TEXT or any(isinstance(part, dict) and "pattern" in part for part in parts):
        del schema["format"]


def referred(schema: Any, root: Schema) -> Schema:
    """The schema that a `$ref` to another part of `root` means, or `schema` itself; empty if there is none."""
    path = cast("Schema", schema).get("$ref") if isinstance(schema, dict) else None
    if isinstance(path, str):
        schema = root
        for part in path.removeprefix("#/").split("/"):
            schema = cast("Schema", schema).get(part) if isinstance(schema, dict) else None
    return cast("Schema", schema) if isinstance(schema, dict) else {}
