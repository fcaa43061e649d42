"""`/openapi.json`: what each call takes and answers, so that code generators and schemathesis accept it. Pure.

Routes carry a `Described` (`described`); `document` makes the document of all routes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from router.http.answer_types import Error
from router.http.json_body import Json

_KEY = "kvrelay"
_REF = "#/components/schemas/{model}"
ERRORS = {
    400: "malformed, out of range, or longer than the model's context",
    401: "no API key, or a wrong one",
    403: "this server does not allow the call",
    404: "no such model or object",
    405: "this method is not allowed here",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body was not sent as application/json",
    429: "too many requests are waiting; Retry-After says when to try again",
    500: "the engine or the router failed",
    503: "no node can serve this now; try again",
    504: "the request took longer than its limit",
}
"""Meaning of each status."""
OF_BODIES = (400, 404, 408, 413, 415, 503)
"""Statuses of every call with a body."""
OF_GENERATION = (*OF_BODIES, 429, 500, 504)
"""Statuses of calls that generate."""
_GONE = "the client closed the connection before the answer; nobody receives this"


class Described(NamedTuple):
    """Description of a call in `/openapi.json`, besides its docstring."""

    answer: Any = None
    """Type of the JSON answer; None: it has no body."""
    body: Any = None
    """Type of the request's body; None: it has none."""
    errors: tuple[int, ...] = ()
    error: Any = Error
    """Type of error answers."""
    media_type: str = "application/json"
    stream: str = ""
    """Media type of the answer with `stream: true`; empty: it cannot be streamed."""
    also: tuple[int, ...] = ()
    """Further statuses with the same body as 200."""


def described(
    answer: Any = None,
    *,
    body: Any = None,
    errors: tuple[int, ...] = (),
    error: Any = Error,
    media_type: str = "application/json",
    stream: str = "",
    also: tuple[int, ...] = (),
) -> dict[str, Any]:
    """A route's `openapi_extra`."""
    return {_KEY: Described(answer, body, errors, error, media_type, stream, also)}


def generates(answer: Any, body: Any, *, error: Any = Error, stream: str = "text/event-stream") -> dict[str, Any]:
    """`described` of a call that generates. `stream`: as in `Described`."""
    return described(answer, body=body, errors=OF_GENERATION, error=error, stream=stream)


def document(app: FastAPI, *, with_keys: bool, open_paths: Iterable[str]) -> Json:
    """The OpenAPI 3.1 document. `with_keys`: whether all paths but `open_paths` need an API key."""
    calls = [
        (route, (route.openapi_extra or {}).get(_KEY, Described()))
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    ]
    refs, schemas = _schemas([kind for _, call in calls for kind in (call.answer, call.body, call.error)])
    paths: Json = {}
    for route, call in calls:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        guarded = with_keys and path not in open_paths
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                paths.setdefault(path, {})[method.lower()] = _operation(route, call, refs, guarded=guarded)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": app.title,
            "version": app.version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
    }


def _schemas(kinds: list[Any]) -> tuple[dict[Any, Json], Json]:
    """A reference to each type, and the schemas that they refer to."""
    types = [kind for kind in dict.fromkeys(kinds) if kind is not None]
    inputs: list[tuple[Any, Literal["validation"], TypeAdapter[Any]]] = [
        (kind, "validation", TypeAdapter(kind)) for kind in types
    ]
    found, shared = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    return {kind: found[kind, "validation"] for kind in types}, shared.get("$defs", {})


def _operation(route: APIRoute, call: Described, refs: dict[Any, Json], *, guarded: bool) -> Json:
    about = inspect.cleandoc(route.endpoint.__doc__ or "")
    statuses = {*call.errors, *((401,) if guarded else ())}
    shape = {"application/json": {"schema": refs[call.error]}}
    answers: Json = {str(status): {"description": ERRORS[status], "content": shape} for status in statuses}
    for status in (200, *call.also):
        answers[str(status)] = _success(call, refs)
    if call.body is not None:
        answers["499"] = {"description": _GONE}
    operation: Json = {
        "operationId": route.endpoint.__name__,
        "summary": about.partition("\n")[0],
        "description": about,
        "responses": dict(sorted(answers.items())),
    }
    names = re.findall(r"{(\w+)", route.path)
    if names:
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    if call.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[call.body]}}}
    if guarded:
        operation["security"] = [{"bearer": []}, {"x-api-key": []}]
    return operation


def _success(call: Described, refs: dict[Any, Json]) -> Json:
    if call.answer is None and call.media_type == "application/json":
        return {"description": "no body"}
    schema = {"type": "string"} if call.answer is None else refs[call.answer]
    content: Json = {call.media_type: {"schema": schema}}
    if call.stream:
        content[call.stream] = {}
    return {
        "description": "the answer" + (", as events with `stream: true`" if call.stream else ""),
        "content": content,
    }
