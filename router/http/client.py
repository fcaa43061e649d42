"""The client of a request and the tokens that it used, kept in the request's ASGI scope. No I/O."""

from __future__ import annotations

import ipaddress
from asyncio import Future
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from starlette.types import Scope

_CLIENT = "kvrelay.client"
"""Key of a request's `Client` in its ASGI scope."""
_USED_TOKENS = "kvrelay.used_tokens"
"""Key of a function that returns the tokens which a request has used."""
_GOES_ON = "kvrelay.goes_on"
"""Key of a request's work in the background."""


class Client(NamedTuple):
    """A client, as the router distinguishes it from others."""

    name: str
    """A hash of its API key, or its address (the /64 network of IPv6) where there are no keys."""
    highest_priority: int = 0
    """The lowest number that `priority` may have."""


def client_of(scope: Scope) -> Client:
    """The client that sent a request."""
    client: Client | None = scope.get(_CLIENT)
    return client or Client(_network((scope.get("client") or ("",))[0]))


@lru_cache(4096)
def _network(address: str) -> str:
    """An IPv4 address, or the network of an IPv6 address: one client has 2**64 of these."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((int(parsed), 64), strict=False))


def note_client(scope: Scope, client: Client) -> None:
    """Set the client that sent a request."""
    scope[_CLIENT] = client


def has_client(scope: Scope) -> bool:
    """Whether `note_client` was called for this request."""
    return _CLIENT in scope


def count_tokens(scope: Scope, used: Callable[[], int]) -> None:
    """Register the function `used`: when the request is over, its key is charged with `used()` tokens."""
    scope[_USED_TOKENS] = used


def go_on(scope: Scope, work: Future[Any]) -> None:
    """The request goes on behind its answer until `work` ends."""
    scope[_GOES_ON] = work


def when_over(scope: Scope, end: Callable[[int], None]) -> None:
    """Call `end` with the tokens that the request has used: now, or when its work in the background ends."""
    work: Future[Any] | None = scope.get(_GOES_ON)
    if work is None:
        end(used_tokens(scope))
    else:
        work.add_done_callback(lambda _: end(used_tokens(scope)))


def used_tokens(scope: Scope) -> int:
    """Tokens that the request has used; 0 if nothing counted them."""
    used: Callable[[], int] = scope.get(_USED_TOKENS, int)
    return used()
