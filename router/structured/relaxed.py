"""Keywords of JSON schemas that no grammar enforces: they are left out of the grammar and named to the client. Pure.

A client that asks for `strict` gets a refusal instead, by name (`router.structured.json_schema`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.base.errors import BadRequest
from router.output.json_values import members, types_of
from router.structured.number_bounds import hold_numbers
from router.structured.patterns import is_supported

Schema = dict[str, Any]

NOT_ENFORCED = (
    *("uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$recursiveRef", "divisibleBy", "disallow", "extends", "x-guidance"),
)
"""Keywords that are left out wherever they stand, unless an equivalent was found before."""
_SILENT = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that mean nothing without another one."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
        "unknown",  # llguidance's name of any text
    }
)
"""Formats of strings that grammars hold."""


class Relaxed:
    """What was left out of the schemas of one request."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Keywords, each once."""
        return tuple(self._names)

    def note(self, names: Iterable[str]) -> None:
        """Something was left out."""
        self._names.update(dict.fromkeys(names))

    def relax(self, schema: Schema, largest_minimum: int | None) -> None:
        """Leave out of one schema, not of those within it, what no grammar enforces.

        `largest_minimum`: the largest `minProperties` that can be held; None: any is.
        """
        found = [key for key in NOT_ENFORCED if key in schema]
        for key in found:
            del schema[key]
        self.note(key for key in found if _SILENT.get(key) is None or _SILENT[key] not in found)
        schema.pop("$dynamicAnchor", None)
        kind = schema.get("format")
        is_held = isinstance(kind, str) and kind in FORMATS
        if "format" in schema and not is_held and "string" in types_of(schema, "string"):
            self._leave_out(schema, "format")
        if isinstance(schema.get("pattern"), str) and not is_supported(schema["pattern"]):
            self._leave_out(schema, "pattern")
        self._relax_names(schema)
        least = schema.get("minProperties")
        if largest_minimum is not None and isinstance(least, int) and least > largest_minimum:
            schema["minProperties"] = largest_minimum
            self.note(["minProperties"])
        if "required" in schema and not isinstance(schema["required"], list):
            self._leave_out(schema, "required")
        for key in schema.keys() & {*_COUNTS, *_BOUNDS, "const", "enum"}:
            if not _is_held(key, schema[key]):
                self._leave_out(schema, key)

    def _relax_names(self, schema: Schema) -> None:
        """Further names may have any value where the pattern of some is not held."""
        if not all(map(is_supported, members(schema.get("patternProperties")))):
            self._leave_out(schema, "patternProperties")
            schema.pop("additionalProperties", None)

    def _leave_out(self, schema: Schema, key: str) -> None:
        del schema[key]
        self.note([key])


def _is_held(key: str, value: Any) -> bool:
    """Whether a limit is a number, and a number one that llguidance reads."""
    if key in _COUNTS:
        return type(value) is int and value >= 0
    if key in _BOUNDS and type(value) not in (int, float):
        return False
    try:
        hold_numbers({key: value})
    except BadRequest:
        return False
    return True
