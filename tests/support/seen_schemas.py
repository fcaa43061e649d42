"""Schemas in the form in which tool servers, pydantic and zod-to-json-schema write them; small, written by hand.

Each has a value that it admits, and one that it does not, if the grammar can tell them apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Schema = dict[str, Any]


class Seen(NamedTuple):
    """`good` and `bad`: values. `relaxed`: the keywords that no grammar holds."""

    schema: Schema
    good: Any
    bad: Any = None
    relaxed: tuple[str, ...] = ()


def _object(properties: Schema, *required: str, closed: bool = True, **more: Any) -> Schema:
    further = {"additionalProperties": False} if closed else {}
    return {"type": "object", "properties": properties, "required": list(required), **further, **more}


TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

SERVERS: dict[str, Seen] = {
    "filesystem: edit_file": Seen(
        _object(
            {
                "path": TEXT,
                "edits": {"type": "array", "items": _object({"oldText": TEXT, "newText": TEXT}, "oldText", "newText")},
                "dryRun": {"type": "boolean", "default": False},
            },
            "path",
            "edits",
            **{"$schema": DRAFT_7},
        ),
        {"path": "/a", "edits": [{"oldText": "x", "newText": "y"}]},
        {"path": "/a"},
    ),
    "github: create_or_update_file": Seen(
        _object(
            {"owner": TEXT, "repo": {**TEXT, "description": "Name"}, "sha": TEXT, "private": {"type": "boolean"}},
            "owner",
            "repo",
            closed=False,
        ),
        {"owner": "a", "repo": "b"},
        {"owner": "a"},
    ),
    "gitlab: get_file_contents": Seen(
        _object({"project_id": TEXT, "ref": {"anyOf": [TEXT, {"type": "null"}]}}, "project_id"),
        {"project_id": "1", "ref": None},
        {"project_id": 1},
    ),
    "fetch: fetch": Seen(
        _object(
            {
                "url": {"type": "string", "format": "uri", "minLength": 1},
                "max_length": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000000, "default": 5000},
                "raw": {"type": "boolean", "default": False},
            },
            "url",
            closed=False,
            title="Fetch",
        ),
        {"url": "https://a.org/", "max_length": 10},
        {"url": "https://a.org/", "max_length": 0},
    ),
    "memory: create_entities": Seen(
        _object(
            {
                "entities": {
                    "type": "array",
                    "items": _object(
                        {"name": TEXT, "entityType": TEXT, "observations": {"type": "array", "items": TEXT}},
                        "name",
                        "entityType",
                        "observations",
                    ),
                }
            },
            "entities",
        ),
        {"entities": [{"name": "a", "entityType": "b", "observations": []}]},
        {"entities": [{"name": "a"}]},
    ),
    "sequential thinking: sequentialthinking": Seen(
        _object({"thought": TEXT, "thoughtNumber": {"type": "integer", "minimum": 1}}, "thought", "thoughtNumber"),
        {"thought": "a", "thoughtNumber": 1},
        {"thought": "a", "thoughtNumber": 0},
    ),
    "playwright: browser_click": Seen(
        _object(
            {
                "element": TEXT,
                "button": {"type": "string", "enum": ["left", "right", "middle"]},
                "modifiers": {"type": "array", "items": {"type": "string", "enum": ["Alt", "Shift"]}},
            },
            "element",
            **{"$schema": "https://json-schema.org/draft/2020-12/schema"},
        ),
        {"element": "a", "modifiers": ["Alt"]},
        {"element": "a", "button": "top"},
    ),
    "puppeteer: puppeteer_navigate": Seen(
        _object({"url": TEXT, "launchOptions": {"type": "object", "description": "any"}}, "url", closed=False),
        {"url": "a", "launchOptions": {"headless": True}},
        {"url": "a", "launchOptions": 1},
    ),
    "slack: conversations_add_message": Seen(
        _object(
            {"channel_id": {**TEXT, "pattern": "^(C|G|D)[A-Z0-9]{2,}$"}, "content_type": {"const": "text/plain"}},
            "channel_id",
        ),
        {"channel_id": "C01", "content_type": "text/plain"},
        {"channel_id": "x"},
    ),
    "postgres: query": Seen(
        _object({"sql": TEXT, "params": {"type": "array", "items": {}}}, "sql"), {"sql": "a", "params": [1, "b"]}, {}
    ),
    "sqlite: write_query": Seen(_object({"query": TEXT}, "query", closed=False), {"query": "a"}, {}),
    "brave search: brave_web_search": Seen(
        _object({"query": {**TEXT, "maxLength": 400}, "count": {**NUMBER, "minimum": 1, "maximum": 20}}, "query"),
        {"query": "a", "count": 2.5},
        {"query": "a", "count": 21},
    ),
    "google maps: maps_directions": Seen(
        _object({"origin": TEXT, "mode": {"type": "string", "enum": ["driving", "walking"]}}, "origin"),
        {"origin": "a", "mode": "walking"},
        {"origin": "a", "mode": "flying"},
    ),
    "sentry: search_issues": Seen(
        _object(
            {"organizationSlug": {**TEXT, "pattern": r"^(?!\d+$)[a-z0-9-]+$"}, "limit": {"type": "integer"}}, "limit"
        ),
        {"organizationSlug": "acme", "limit": 1},
        {"organizationSlug": "acme"},
        ("pattern",),
    ),
    "notion: API-post-page": Seen(
        _object(
            {
                "parent": {
                    "oneOf": [
                        _object({"page_id": {**TEXT, "format": "uuid"}}, "page_id"),
                        _object({"database_id": {**TEXT, "format": "uuid"}}, "database_id"),
                    ]
                },
                "icon": {**TEXT, "format": "json"},
            },
            "parent",
            closed=False,
        ),
        {"parent": {"page_id": "0e37df36-f698-11e6-8dd4-cb9ced3df976"}, "icon": "{}"},
        {"parent": {}},
        ("format",),
    ),
    "linear: create_issue": Seen(
        _object({"title": TEXT, "priority": {"type": ["integer", "null"], "minimum": 0, "maximum": 4}}, "title"),
        {"title": "a", "priority": None},
        {"title": "a", "priority": 5},
    ),
    "atlassian: jira_create_issue": Seen(
        _object(
            {"fields": {"anyOf": [{"type": "object", "additionalProperties": True}, TEXT, {"type": "null"}]}}, "fields"
        ),
        {"fields": {"a": 1}},
        {"fields": 1},
    ),
    "stripe: create_refund": Seen(
        _object({"amount": {"type": "integer", "minimum": True}, "metadata": {"type": "object"}}, closed=False),
        {"amount": 5},
        None,
        ("minimum",),
    ),
    "figma: get_images": Seen(
        _object(
            {
                "nodes": {
                    "type": "array",
                    "minItems": 1,
                    "uniqueItems": True,
                    "items": {**TEXT, "pattern": r"^\d+[:-]\d+$"},
                },
                "scale": {"type": "number", "exclusiveMinimum": True, "minimum": 0},
            },
            "nodes",
        ),
        {"nodes": ["1:2", "1:3"], "scale": 0.5},
        {"nodes": []},
        ("uniqueItems",),
    ),
    "context7: get-library-docs": Seen(
        _object(
            {"libraryID": TEXT, "tokens": {"type": "number", "minimum": 10000}}, "libraryID", **{"$schema": DRAFT_7}
        ),
        {"libraryID": "a", "tokens": 10000},
        {"libraryID": "a", "tokens": 5},
    ),
    "time: convert_time": Seen(
        _object({"time": {**TEXT, "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"}, "zone": TEXT}, "time", "zone"),
        {"time": "23:59", "zone": "UTC"},
        {"time": "24:00", "zone": "UTC"},
    ),
    "docker: create_container": Seen(
        _object(
            {
                "image": TEXT,
                "ports": {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]+$"},
                    "additionalProperties": {"type": "integer"},
                },
                "restart": {"type": "string", "required": True},
            },
            "image",
        ),
        {"image": "a", "ports": {"80": 8080}},
        {"image": "a", "ports": {"x": 1}},
        ("required",),
    ),
}
"""One tool of each of twenty-two widely used tool servers."""

_CAT = _object({"kind": {"const": "cat", "default": "cat", "type": "string"}, "lives": {"type": "integer"}}, "lives")
_DOG = _object({"kind": {"const": "dog", "default": "dog", "type": "string"}, "name": TEXT}, "name")
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"

PYDANTIC: dict[str, Seen] = {
    "`Decimal`": Seen({"anyOf": [NUMBER, {**TEXT, "pattern": _DECIMAL + r"\d*\.?\d*$"}]}, "-1.50", "."),
    "`Decimal` with `max_digits` and `decimal_places`": Seen(
        {**TEXT, "pattern": _DECIMAL + r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"}, "123.45", "."
    ),
    "`Decimal` with `max_digits`": Seen(
        {**TEXT, "pattern": _DECIMAL + r"(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)"}, "12.34", "."
    ),
    "`set[str]`, `frozenset`": Seen(
        {"type": "array", "items": TEXT, "uniqueItems": True}, ["a", "b"], [1], ("uniqueItems",)
    ),
    "`dict[str, int]` with `min_length=1`": Seen(
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}, {"a": 1}, {}
    ),
    "`dict[str, int]` with `min_length=2`": Seen(
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        {"a": 1, "b": 2},
        {},
        ("minProperties",),
    ),
    "`dict[constr(pattern=...), int]`": Seen(
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
        {"ab": 1},
        {"AB": 1},
    ),
    "`dict[Literal[...], int]`": Seen(
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        {"a": 1},
        {"c": 1},
    ),
    "union with a discriminator whose tag has a default": Seen(
        {
            "$defs": {"Cat": _CAT, "Dog": _DOG},
            "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        },
        {"kind": "cat", "lives": 9},
        {"kind": "dog", "lives": 9},
    ),
    "`Optional[int]`": Seen({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, None, "a"),
    "`tuple[int, str]`": Seen(
        {"type": "array", "prefixItems": [{"type": "integer"}, TEXT], "minItems": 2, "maxItems": 2}, [1, "a"], ["a", 1]
    ),
    "`list[Self]`": Seen(
        {
            "$defs": {"Tree": _object({"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}, "children")},
            "$ref": "#/$defs/Tree",
        },
        {"children": [{"children": []}]},
        {"children": [1]},
    ),
    "`Enum`, `IntEnum`": Seen({"$defs": {"E": {"enum": [1, 2], "type": "integer"}}, "$ref": "#/$defs/E"}, 2, 3),
    "`bytes`, `SecretStr`, `Path`": Seen({"type": "string", "format": "binary"}, "a", 1),
    "`datetime`, `date`, `timedelta`": Seen({"type": "string", "format": "date-time"}, "2024-02-29T00:00:00Z", "today"),
    "`EmailStr`, `UUID`, `AnyUrl`": Seen({"type": "string", "format": "email"}, "a@b.org", "a"),
    "`IPvAnyAddress`": Seen({"type": "string", "format": "ipvanyaddress"}, "::1", "a"),
    "`UUID4`": Seen(
        {"type": "string", "format": "uuid4"},
        "0e37df36-f698-41e6-8dd4-cb9ced3df976",
        "0e37df36-f698-11e6-8dd4-cb9ced3df976",
    ),
    "`Base64Str`, OpenAPI's `byte`": Seen({"type": "string", "format": "base64"}, "YWI=", "YWI"),
    "`NameEmail`, `Color`": Seen({"type": "string", "format": "name-email"}, "a", 1, ("format",)),
    "`conint(multiple_of=5)`": Seen({"type": "integer", "multipleOf": 5, "minimum": 0}, 15, 16),
    "`Json[...]`": Seen({"type": "string", "contentMediaType": "application/json", "contentSchema": NUMBER}, "1", 1),
    "`Any`, `object`": Seen({}, {"a": [None]}),
}
"""By the type of a field or model."""

ZOD: dict[str, Seen] = {
    "`z.record(z.string(), z.number())`": Seen(
        {"type": "object", "additionalProperties": NUMBER}, {"a": 1}, {"a": "b"}
    ),
    "`z.record(z.string().min(2), ...)`": Seen(
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": {"minLength": 2}}, {"ab": 1}, {"a": 1}
    ),
    "`z.record(z.string().uuid(), ...)`": Seen(
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": {"format": "uuid"}},
        {"a": 1},
        {"a": "b"},
        ("propertyNames",),
    ),
    "`z.map(...)`": Seen(
        {
            "type": "array",
            "maxItems": 125,
            "items": {"type": "array", "items": [TEXT, NUMBER], "minItems": 2, "maxItems": 2},
        },
        [["a", 1]],
        [["a"]],
    ),
    "`z.set(...)`": Seen({"type": "array", "uniqueItems": True, "items": TEXT}, ["a"], [1], ("uniqueItems",)),
    "`z.number().positive()` for OpenAPI 3": Seen({**NUMBER, "exclusiveMinimum": True, "minimum": 0}, 0.5, 0),
    "`z.string().emoji()`, `.regex()` with `u`": Seen(
        {**TEXT, "pattern": "^(\\p{Extended_Pictographic}|\\p{Emoji_Component})+$"}, "😀", "a"
    ),
    "`z.string().cuid()`, `.nanoid()`": Seen({**TEXT, "pattern": "^[cC][^\\s-]{8,}$"}, "cabcdefgh", "c"),
    "`z.string().includes()` and others": Seen({**TEXT, "allOf": [{"pattern": "a"}, {"pattern": "b$"}]}, "cab", "ba"),
    "`z.string().jwt()`": Seen(
        {**TEXT, "pattern": r"^[A-Za-z0-9-_]+\.[A-Za-z0-9-_]+\.[A-Za-z0-9-_]*$"}, "a.b.c", "a.b"
    ),
    "`z.discriminatedUnion()`": Seen(
        {
            "anyOf": [
                _object({"type": {"type": "string", "const": "a"}}, "type"),
                _object({"type": {"type": "string", "const": "b"}, "x": NUMBER}, "type", "x"),
            ]
        },
        {"type": "b", "x": 1},
        {"type": "b"},
    ),
    "`z.intersection()`": Seen(
        {"allOf": [_object({"a": TEXT}, "a", closed=False), _object({"b": TEXT}, "b", closed=False)]},
        {"a": "x", "b": "y"},
        {"a": "x"},
    ),
    "`z.never()`": Seen(_object({"a": {"not": {}}, "b": TEXT}), {"b": "x"}, {"a": 1}),
    "`z.any().refine()` as `not`": Seen({"type": ["string", "number"], "not": {"const": "x"}}, "a", True, ("not",)),
    "`z.lazy()`": Seen(
        _object({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "next"), {"next": {"next": None}}, {"next": 1}
    ),
    "`z.bigint()`": Seen({"type": "integer", "format": "int64"}, 2**40, 0.5),
    "`z.nativeEnum()`": Seen({"type": ["string", "number"], "enum": ["a", 1]}, 1, 2),
    "`z.string().date()`, `.time()`, `.duration()`": Seen({**TEXT, "format": "time"}, "12:00:00Z", "noon"),
}
"""By the expression."""

BY_HAND: dict[str, Seen] = {
    "`if` a listed value `then`, `else`": Seen(
        _object(
            {"kind": {"enum": ["a", "b"]}, "x": NUMBER},
            "kind",
            **{"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}},
        ),
        {"kind": "b"},
        {"kind": "a"},
    ),
    "`if` anything else": Seen(
        _object({"a": TEXT}, **{"if": {"required": ["a"]}, "then": {"minProperties": 1}}), {"a": "x"}, {"a": 1}, ("if",)
    ),
    "`dependentRequired`": Seen(_object({"a": TEXT, "b": TEXT}, dependentRequired={"a": ["b"]}), {"b": "x"}, {"a": "x"}),
    "`dependencies` with schemas": Seen(
        _object({"a": TEXT, "b": TEXT}, dependencies={"a": {"required": ["b"]}}), {"b": "x"}, {"a": 1}, ("dependencies",)
    ),
    "`oneOf` of required properties": Seen(
        _object({"a": TEXT, "b": TEXT}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]), {"a": "x"}, {"a": "x", "b": "y"}
    ),
    "`not` of required properties": Seen(
        _object({"a": TEXT, "b": TEXT}, **{"not": {"required": ["a", "b"]}}), {"a": "x"}, {"a": "x", "b": "y"}
    ),
    "`oneOf` whose branches overlap": Seen(
        {"oneOf": [{"type": "integer"}, {**NUMBER, "minimum": 5}]}, 7.5, "a", ("oneOf",)
    ),
    "`contains`": Seen({"type": "array", "contains": {"const": 1}, "minContains": 1}, [1], {}, ("contains",)),
    "`patternProperties`": Seen(
        {"type": "object", "patternProperties": {"^x-": TEXT}, "additionalProperties": False}, {"x-a": "b"}, {"y": "b"}
    ),
    "look-ahead at the beginning": Seen({**TEXT, "pattern": r"^(?=.*\d)(?=.*[a-z]).{4,8}$"}, "abc1", "abcd"),
    "look-behind, word boundary": Seen({**TEXT, "pattern": r"\bid\b"}, "id", 1, ("pattern",)),
    "`const` beyond 2^53": Seen({"type": "integer", "const": 2**53 + 1}, 1, "a", ("const",)),
    "`unevaluatedProperties`": Seen(
        {"type": "object", "properties": {"a": TEXT}, "unevaluatedProperties": False}, {"a": "x"}, {"a": 1}, ("unevaluatedProperties",)
    ),
}  # fmt: skip
"""What people write by hand."""
