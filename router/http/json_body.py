"""JSON bodies, server-sent events and errors in OpenAI's shape. Pure; `to_json` is on the router's hot path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, cast

import pydantic_core

from common.base.errors import ClientError, KvRelayError, Overloaded
from common.base.sentences import one_line

Json = dict[str, Any]
_MANY = 16_384
"""Items that are serialized in one call."""
_FEW = 1024
"""The same for larger items."""


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8 on one line; numbers that JSON does not have (NaN, infinite ones) are null."""
    try:
        text = pydantic_core.to_json(value, inf_nan_mode="null")
    except pydantic_core.PydanticSerializationError:  # an unpaired surrogate, which can only come from a client
        value = pydantic_core.to_jsonable_python(value, inf_nan_mode="null")
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return one_line(text)


class RawJson(NamedTuple):
    """A value that `large_json` writes as it is."""

    data: bytes


def in_slices(items: Iterator[Any], kind: type[list[Any]] | type[dict[str, Any]]) -> RawJson:
    """The JSON list or object of these items (of an object: pairs), of which only few exist at a time."""
    parts: list[bytes] = []
    while part := kind(islice(items, _FEW)):
        parts.append(to_json(part)[1:-1])
    return RawJson((b"[%b]" if kind is list else b"{%b}") % b",".join(parts))


def large_json(value: object) -> bytes:
    """JSON bytes of objects, lists and iterators, serialized in small pieces: one call for millions of numbers would stop all
    threads of the interpreter for as long."""
    return b"".join(_pieces(value))


def _pieces(value: object) -> Iterator[bytes]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    has_more_inside = bool(items) and isinstance(items[0], list | Mapping | RawJson)
    if isinstance(value, RawJson):
        yield value.data
    elif isinstance(value, Mapping):
        mark = b"{"
        for key, each in cast("Mapping[str, object]", value).items():
            yield mark + to_json(key) + b":"
            yield from _pieces(each)
            mark = b","
        yield b"}" if mark == b"," else b"{}"
    elif isinstance(value, Iterator) or has_more_inside:
        mark = b"["
        for each in cast("Iterable[object]", value):
            yield mark
            yield from _pieces(each)
            mark = b","
        yield b"]" if mark == b"," else b"[]"
    elif len(items) > _MANY:
        mark = b"["
        for start in range(0, len(items), _MANY):
            yield mark + to_json(items[start : start + _MANY])[1:-1]
            mark = b","
        yield b"]"
    else:
        yield to_json(cast("object", value))


def sse(data: Json, serialize: Callable[[object], bytes] = to_json) -> bytes:
    """One server-sent event."""
    return b"data: " + serialize(data) + b"\n\n"


def error_body(error: KvRelayError) -> Json:
    """An error in OpenAI's shape."""
    if isinstance(error, ClientError):
        kind = "invalid_request_error"
    elif isinstance(error, Overloaded):
        kind = "rate_limit_error"
    else:
        kind = "server_error"
    return {
        "error": {
            "message": error.message or error.code,
            "type": kind,
            "param": getattr(error, "param", None),
            "code": error.code,
        }
    }
