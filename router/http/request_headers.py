"""Reads headers from a request's ASGI scope. Pure."""

from __future__ import annotations

from starlette.types import Scope

_HEADERS = "kvrelay.headers"
"""Key of a request's headers by name in its ASGI scope."""


def header(scope: Scope, name: bytes) -> str:
    """The value of a header, whose name is given in lower case; empty if it is missing. Of several, the first counts."""
    headers: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if headers is None:
        headers = scope[_HEADERS] = dict(reversed(scope["headers"]))
    return headers.get(name, b"").decode("latin-1")


def api_key(scope: Scope) -> str:
    """The API key of a request: a bearer token, else the `x-api-key` of Anthropic's clients; empty if none. The scheme's case
    and spaces around the key do not matter.
    """
    scheme, _, key = header(scope, b"authorization").partition(" ")
    if scheme.lower() != "bearer":
        key = header(scope, b"x-api-key")
    return key.strip(" \t")  # other bytes that Latin-1 takes for spaces may end a character of UTF-8
