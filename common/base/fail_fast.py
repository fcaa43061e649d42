"""Makes pydantic stop at the first wrong item of a list; reporting a million of them takes minutes and gigabytes."""

from __future__ import annotations

from typing import Any, cast

from pydantic_core import CoreSchema


def fail_fast(schema: CoreSchema) -> CoreSchema:
    """Return the schema with `fail_fast` set for every list in it."""
    return cast("CoreSchema", _changed(schema))


def _changed(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {key: _changed(part) for key, part in cast("dict[str, Any]", schema).items()}
        return {**changed, "fail_fast": True} if changed.get("type") == "list" else changed
    return [_changed(part) for part in cast("list[Any]", schema)] if isinstance(schema, list) else schema
