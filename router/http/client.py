"""Who sent a request, and what it used: notes in its ASGI scope. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from starlette.types import Scope

_CLIENT = "kvrelay.client"
"""Key of a request's `Client` in its ASGI scope."""
_USED_TOKENS = "kvrelay.used_tokens"
"""Key of a function that returns the tokens which a request has used."""


class Client(NamedTuple):
    """A client as the router tells it from others."""

    name: str
    """A hash of its API key, or its address where there are no keys."""
    highest_priority: int = 0
    """The lowest number that `priority` may have."""


def client_of(scope: Scope) -> Client:
    """Who sent a request."""
    client: Client | None = scope.get(_CLIENT)
    return client or Client((scope.get("client") or ("",))[0])


def note_client(scope: Scope, client: Client) -> None:
    """Set who sent a request."""
    scope[_CLIENT] = client


def count_tokens(scope: Scope, used: Callable[[], int]) -> None:
    """When the request is over, its key is charged with `used()` tokens."""
    scope[_USED_TOKENS] = used


def used_tokens(scope: Scope) -> int:
    """Tokens that the request has used; 0 if nothing counted them."""
    used: Callable[[], int] = scope.get(_USED_TOKENS, int)
    return used()
