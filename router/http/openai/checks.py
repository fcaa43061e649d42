"""What the checks of request bodies share: bounds, and how error messages quote a client's input. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field

ECHO_CHARS = 200
"""Error messages quote at most this much of the client's input."""

MAX_INT = 2**31 - 1
"""Upper limit for all integers except the seed: integers of JSON are unbounded, integers of the wire protocol are not."""
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]

MAX_CONTENT_PARTS = 4096
"""Maximum for one message."""
MAX_TOOL_CALLS = 128
"""Maximum for one message."""
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 10_000

_excerpt = reprlib.Repr()
_excerpt.maxlevel = 3
_excerpt.maxlist = _excerpt.maxdict = 8
_excerpt.maxlong = 40


class FieldsError(ValueError):
    """A check of several fields failed. `param`: the field that the answer to the client names."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def shorten(value: object) -> str:
    """`value` as error messages show it. The cost does not depend on its size."""
    text = repr(value[: ECHO_CHARS + 1]) if isinstance(value, str) else _excerpt.repr(value)
    return text if len(text) <= ECHO_CHARS else text[:ECHO_CHARS] + "..."


def items(value: Any) -> list[Any] | None:
    """`value` if it is a list."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def as_object(value: Any) -> dict[str, Any] | None:
    """`value` if it is a JSON object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def type_of(value: Any) -> str | None:
    """The `type` of a JSON object; None if it has none."""
    kind = (as_object(value) or {}).get("type")
    return kind if isinstance(kind, str) else None


def with_integers(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an object, whole floats as integers: some clients write every number as a float."""
    return {
        name: int(value) if type(value) is float and value.is_integer() else value for name, value in fields.items()
    }


def bounded(value: Any, limit: int, what: str) -> Any:
    """`value`, unless it is too long a list. Checked before the items, because each wrong item creates an error object."""
    if len(items(value) or ()) > limit:
        raise ValueError(f"at most {limit} {what} are allowed")
    return value


def at_most(limit: int, what: str) -> BeforeValidator:
    """Makes a field refuse longer lists, as `bounded` does."""
    return BeforeValidator(lambda value: bounded(value, limit, what))


def texts_or_token_ids(value: Any, limit: int, what: str) -> list[Any]:
    """One or several texts, or lists of token ids, as a list. Raises: ValueError."""
    found = [value] if isinstance(value, str) else items(value)
    if found and _are_token_ids(found):
        found = [found]
    bounded(found, limit, what)
    if found is None or not (all(isinstance(each, str) for each in found) or all(map(_are_token_ids, found))):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    return found


def _are_token_ids(value: Any) -> bool:
    tokens = items(value)
    return tokens is not None and set(map(type, tokens)) <= {int}


def bounded_json(value: Any) -> Any:
    """`value`, a JSON value that the client defines, unless it is nested too deep or has too many values."""
    level, count = [value], 0
    for _ in range(MAX_JSON_DEPTH):
        count += len(level)
        if count > MAX_JSON_VALUES:
            raise ValueError(f"at most {MAX_JSON_VALUES} values are allowed")
        level = [inner for each in level for inner in _members(each)]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")


def _members(value: Any) -> Iterable[Any]:
    members = as_object(value)
    return (items(value) or ()) if members is None else members.values()
