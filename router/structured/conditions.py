"""Conditions between the properties of an object, as unions that grammars can hold. Pure.

A union admits an object if one of its branches does; each branch requires properties (`required`) or has none of them (the schema
`false`). So "a needs b" becomes "no a, or a and b". Where only some of the objects that a condition admits can be described so,
the others are left out: every answer is valid.
"""

from __future__ import annotations

import json
from typing import Any

from router.output.json_values import elements, listed_values, members

Schema = dict[str, Any]


def use_unions(schema: Schema) -> None:
    """Replace the conditions of one schema, not those within it, as far as unions can hold them."""
    unions = [*_of_dependencies(schema), *_of_exclusion(schema), *_of_choice(schema), *_of_if(schema)]
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
    listed = elements(value)
    return list(dict.fromkeys(listed)) if all(isinstance(each, str) for each in listed) else []


def _of_dependencies(schema: Schema) -> list[list[Schema]]:
    """`dependentRequired`, and draft 7's `dependencies` of names."""
    unions: list[list[Schema]] = []
    for key in ("dependentRequired", "dependencies"):
        needed = members(schema.get(key))
        if needed and all(_names(names) for names in needed.values()):
            del schema[key]
            unions += [[_without([name]), {"required": _names([name, *names])}] for name, names in needed.items()]
    return unions


def _of_exclusion(schema: Schema) -> list[list[Schema]]:
    """`not` of required properties: one of them is missing."""
    names = _names(members(schema.get("not")).get("required"))
    if not names or len(schema["not"]) > 1:
        return []
    del schema["not"]
    return [[_without([name]) for name in names]]


def _of_choice(schema: Schema) -> list[list[Schema]]:
    """`oneOf` of required properties: those of one branch, and for every other branch one that it requires is missing."""
    branches = [members(branch) for branch in elements(schema.get("oneOf"))]
    required = [_names(branch["required"]) if branch.keys() == {"required"} else [] for branch in branches]
    if len(required) < 2 or not all(required):
        return []
    if any(set(names) <= set(more) for names in required for more in required if names is not more):
        return []
    del schema["oneOf"]
    union: list[Schema] = []
    for names in required:
        others = [next(name for name in more if name not in names) for more in required if more is not names]
        union.append({"required": names, **_without(others)})
    return [union]


def _of_if(schema: Schema) -> list[list[Schema]]:
    """`if` a property has a constant, `then` and `else`: where the property's other values are listed. It is required then."""
    then, otherwise = schema.get("then", {}), schema.get("else", {})
    found = _tested(members(schema.get("if")))
    if found is None or not isinstance(then, dict) or not isinstance(otherwise, dict):
        return []
    name, values = found
    all_values = _values(members(schema.get("properties")).get(name))
    others = [each for each in all_values if json.dumps(each) not in map(json.dumps, values)]
    if not all_values:
        return []
    for key in ("if", "then", "else"):
        schema.pop(key, None)
    branches = [(values, members(then)), (others, members(otherwise))]
    return [[_tagged(branch, name, enum) for enum, branch in branches if enum]]


def _tested(condition: Schema) -> tuple[str, list[Any]] | None:
    """The one property that a condition is about, and its values."""
    listed = members(condition.get("properties"))
    if len(listed) != 1 or not condition.keys() <= {"properties", "required"}:
        return None
    [(name, tested)] = listed.items()
    values = _values(tested)
    return (name, values) if values and _names(condition.get("required", [name])) == [name] else None


def _values(schema: Any) -> list[Any]:
    """All values that a schema of a property lists."""
    fields = members(schema)
    if fields.get("type") == "boolean" and fields.keys().isdisjoint(("const", "enum")):
        return [True, False]
    return listed_values(fields) or []


def _tagged(branch: Schema, name: str, values: list[Any]) -> Schema:
    """The branch, for objects with one of these values."""
    own = members(branch.get("properties"))
    limited = {"allOf": [own[name], {"enum": values}]} if name in own else {"enum": values}
    required = list(dict.fromkeys([*_names(branch.get("required")), name]))
    return {**branch, "properties": {**own, name: limited}, "required": required}
