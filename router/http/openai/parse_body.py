"""From the bytes of a body to a validated request. Pure."""

from __future__ import annotations

import codecs
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from common.base.errors import BadRequest
from router.http.body_model import BodyModel
from router.http.openai.checks import ECHO_CHARS, FieldsError, as_object, items, shorten, with_integers
from router.http.openai.shared_fields import CompletionRequestBase
from router.http.openai.unknown_fields import UNSUPPORTED

RequestT = TypeVar("RequestT", bound=CompletionRequestBase)
ModelT = TypeVar("ModelT", bound=BodyModel)

_UNKNOWN = object()
"""Placeholder for a value that its check saw in another form, such as a list without the items that are left out."""


def parse_body(data: bytes, kind: type[RequestT]) -> RequestT:
    """The request in the body of a completion call. Raises: BadRequest naming the first field that is wrong."""
    return completion_request(read_object(data), kind)


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises: BadRequest when it is something else."""
    data = data.removeprefix(codecs.BOM_UTF8)  # of files from Windows' editors
    try:
        body = as_object(from_json(data, allow_inf_nan=False, cache_strings=False))
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {str(error)[:ECHO_CHARS]}", code="invalid_json") from error
    if body is None:
        raise BadRequest("the body must be a JSON object")
    return body


def completion_request(body: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """A completion call's request. Raises: BadRequest naming the first field that is wrong."""
    for name in sorted(body.keys() & UNSUPPORTED.keys()):
        if not UNSUPPORTED[name](body[name]):
            raise BadRequest(
                f"{name}={shorten(body[name])} is not supported yet", param=name, code="unsupported_parameter"
            )
    return validated(body, kind)


def equivalent_request(fields: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """The completion call's request that means the same as another call's body. Raises: BadRequest.

    Its limit of tokens may be more than the context has room for, which is an error in the two completion calls only.
    """
    body = completion_request(fields, kind)
    body.model_fields_set.difference_update(("max_tokens", "max_completion_tokens"))
    return body


def validated(body: dict[str, Any], kind: type[ModelT]) -> ModelT:
    """A request of any call. Raises: BadRequest naming the first field that is wrong."""
    if float in map(type, body.values()):
        body |= with_integers(body)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A field of several forms has an error for each: the deepest one is that of the form that the client meant.
        first = max(
            (each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]),
            key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")),
        )
        place = _place(first["loc"], body, is_missing=first["type"] == "missing")
        message = first["msg"].removeprefix("Value error, ")
        where = ".".join(place) + ": " if place else ""
        got = "" if first["type"] in ("missing", "value_error") else f" (got {shorten(first['input'])})"
        cause = first.get("ctx", {}).get("error")
        param = place[0] if place else cause.param if isinstance(cause, FieldsError) else None
        raise BadRequest(f"{where}{message}{got}", param=param) from error


def _place(loc: tuple[int | str, ...], body: dict[str, Any], *, is_missing: bool) -> list[str]:
    """Where in the body an error is. pydantic also says which form of a field it tried, by the name of a type or the value of
    `type`: that is left out.
    """
    place: list[str] = []
    value: Any = body
    for index, part in enumerate(loc):
        fields, members = as_object(value), items(value)
        if isinstance(part, int):
            value = members[part] if members is not None and part < len(members) else _UNKNOWN
        elif fields is not None and part in fields:
            value = fields[part]
        elif not (is_missing and index == len(loc) - 1):
            is_form = fields is None or part in (fields.get("type") or "message", *place[-1:])
            if "[" in part or (is_form and value is not _UNKNOWN):
                continue
            value = _UNKNOWN
        place.append(str(part))
    return place
