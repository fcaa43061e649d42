"""Conditions between the properties of an object, as unions that grammars can hold. Pure.

A union admits an object if one of its branches does; each branch requires properties (`required`) or has none of them (the schema
`false`). So "a needs b" becomes "no a, or a and b". Where only some of the objects that a condition admits can be described so,
the others are left out: every answer is valid.
"""

from __future__ import annotations

import json
from typing import Any, cast

Schema = dict[str, Any]


def use_unions(schema: Schema) -> None:
    """Replace the conditions of one schema, not those within it, as far as unions can hold them."""
    unions = [
        *_of_dependencies(schema),
        *_of_exclusion(schema),
        *_of_choice(schema),
        *_of_if(schema),
    ]
    if not unions:
        return
    if "anyOf" not in schema and len(unions) == 1:
        schema["anyOf"] = unions[0]
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"] += [{"anyOf": union} for union in unions]


def _without(names: list[str]) -> Schema:
    return {"properties": dict.fromkeys(names, False)}


def _names(value: Any) -> list[str]:
    """A list of names, without repetitions; empty if it is none."""
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    return list(dict.fromkeys(listed)) if all(isinstance(each, str) for each in listed) else []


def _of_dependencies(schema: Schema) -> list[list[Schema]]:
    """`dependentRequired`, and draft 7's `dependencies` of names."""
    unions: list[list[Schema]] = []
    for key in ("dependentRequired", "dependencies"):
        found = schema.get(key)
        needed = cast("Schema", found) if isinstance(found, dict) else {}
        if needed and all(_names(names) for names in needed.values()):
            del schema[key]
            unions += [[_without([name]), {"required": _names([name, *names])}] for name, names in needed.items()]
    return unions


def _of_exclusion(schema: Schema) -> list[list[Schema]]:
    """`not` of required properties: one of them is missing."""
    names = _names(schema["not"].get("required")) if isinstance(schema.get("not"), dict) else []
    if not names or len(schema["not"]) > 1:
        return []
    del schema["not"]
    return [[_without([name]) for name in names]]


def _of_choice(schema: Schema) -> list[list[Schema]]:
    """`oneOf` of required properties: those of one branch, and for every other branch one that it requires is missing."""
    branches: Any = schema.get("oneOf")
    if not isinstance(branches, list) or len(cast("list[Any]", branches)) < 2:
        return []
    required: list[list[str]] = []
    for branch in cast("list[Any]", branches):
        only = isinstance(branch, dict) and cast("Schema", branch).keys() == {"required"}
        required.append(_names(branch["required"]) if only else [])
    if not all(required) or any(
        set(names) <= set(more) for names in required for more in required if names is not more
    ):
        return []
    del schema["oneOf"]
    union: list[Schema] = []
    for names in required:
        others = [next(name for name in more if name not in names) for more in required if more is not names]
        union.append({"required": names, **_without(others)})
    return [union]


def _of_if(schema: Schema) -> list[list[Schema]]:
    """`if` a property has a constant, `then` and `else`: where the property's other values are listed. It is required then."""
    condition, then, otherwise = schema.get("if"), schema.get("then", {}), schema.get("else", {})
    found = _tested(condition)
    listed = schema.get("properties")
    if found is None or not isinstance(listed, dict) or not isinstance(then, dict) or not isinstance(otherwise, dict):
        return []
    name, values = found
    all_values = _values(cast("Schema", listed).get(name))
    others = [each for each in all_values if json.dumps(each) not in map(json.dumps, values)]
    if not all_values:
        return []
    for key in ("if", "then", "else"):
        schema.pop(key, None)
    branches = [(values, cast("Schema", then)), (others, cast("Schema", otherwise))]
    return [[_tagged(branch, name, enum) for enum, branch in branches if enum]]


def _tested(condition: Any) -> tuple[str, list[Any]] | None:
    """The one property that a condition is about, and its values."""
    fields = cast("Schema", condition) if isinstance(condition, dict) else {}
    listed = fields.get("properties")
    if (
        not isinstance(listed, dict)
        or len(cast("Schema", listed)) != 1
        or not fields.keys() <= {"properties", "required"}
    ):
        return None
    [(name, tested)] = cast("Schema", listed).items()
    values = _values(tested)
    return (name, values) if values and _names(fields.get("required", [name])) == [name] else None


def _values(schema: Any) -> list[Any]:
    """All values that a schema of a property lists."""
    fields = cast("Schema", schema) if isinstance(schema, dict) else {}
    if "const" in fields:
        return [fields["const"]]
    if fields.get("type") == "boolean" and "enum" not in fields:
        return [True, False]
    return list(cast("list[Any]", fields["enum"])) if isinstance(fields.get("enum"), list) else []


def _tagged(branch: Schema, name: str, values: list[Any]) -> Schema:
    """The branch, for objects with one of these values."""
    listed = branch.get("properties")
    own = cast("Schema", listed) if isinstance(listed, dict) else {}
    limited = {"allOf": [own[name], {"enum": values}]} if name in own else {"enum": values}
    required = list(dict.fromkeys([*_names(branch.get("required")), name]))
    return {**branch, "properties": {**own, name: limited}, "required": required}
