"""What all types of messages need: the mark of a later field, and validation by pydantic that is strict and ends early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from pydantic import ConfigDict
from pydantic_core import CoreSchema


@dataclass(frozen=True)
class Since:
    """The version in which a field was added, in the field's annotation. An older end is not sent the field
    (`common.control.versions`).

    needed: an older end would do something wrong without the field, so a message in which it differs from its default is
    refused instead.
    """

    version: int
    needed: bool = False


class StrictFields:
    """Base of the dataclasses in messages: a message with an unknown field is refused."""

    __pydantic_config__ = ConfigDict(extra="forbid")


def fail_fast(schema: CoreSchema) -> CoreSchema:
    """Make pydantic stop at the first wrong item of every list in the schema; reporting a million of them takes minutes and
    gigabytes."""
    return cast("CoreSchema", _changed(schema))


def _changed(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {key: _changed(part) for key, part in cast("dict[str, Any]", schema).items()}
        return {**changed, "fail_fast": True} if changed.get("type") == "list" else changed
    return [_changed(part) for part in cast("list[Any]", schema)] if isinstance(schema, list) else schema
