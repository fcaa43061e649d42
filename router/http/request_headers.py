"""Reads headers from a request's ASGI scope. Pure."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str:
    """The value of a header, whose name is given in lower case; empty if it is missing."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return ""


def api_key(scope: Scope) -> str:
    """The API key of a request: a bearer token, else the `x-api-key` of Anthropic's clients; empty if none. The scheme's case
    and spaces around the key do not matter.
    """
    scheme, _, key = header(scope, b"authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else header(scope, b"x-api-key").strip()
