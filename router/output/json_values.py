"""JSON values that may have any shape, such as the schemas of clients. Pure."""

from __future__ import annotations

from typing import Any, cast


def members(value: Any) -> dict[str, Any]:
    """The members of an object; none of another value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def elements(value: Any) -> list[Any]:
    """The elements of a list; none of another value."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def types_of(schema: dict[str, Any], default: str) -> list[Any]:
    """The types that a schema names. `default`: the one of a schema that names none."""
    named = schema.get("type", default)
    return elements(named) if isinstance(named, list) else [named]


def listed_values(schema: dict[str, Any]) -> list[Any] | None:
    """The values that a schema lists as `const` or `enum`; None if it lists none."""
    listed: Any = [schema["const"]] if "const" in schema else schema.get("enum")
    return elements(listed) if isinstance(listed, list) else None


def referred_schema(schema: Any, root: Any) -> dict[str, Any]:
    """The schema that a `$ref` to another part of `root` means, or `schema` itself; empty if there is none."""
    path = members(schema).get("$ref")
    if isinstance(path, str):
        schema = root
        for part in path.removeprefix("#").strip("/").split("/") if path != "#" else ():
            schema = members(schema).get(part)
    return members(schema)
