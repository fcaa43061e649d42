"""Which names a router answers to, and whether a page of another site sends a request. Router's event loop.

Without API keys, a page of any site could have its own name resolved to this router (DNS rebinding): the browser then takes the
router for that site, and lets the page read all answers. The `Host` header tells: it still has the site's name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.errors import Forbidden, KvRelayError
from router.http.api_keys import OPEN_PATHS
from router.http.key_limits import ApiKeys
from router.http.request_headers import header
from router.http.responses import error_response

ANY = "*"
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/?#@\[\]\\]+))(?::\d{1,5})?")
_OPEN = frozenset(path.encode() for path in OPEN_PATHS)


@lru_cache(1024)
def host_name(value: str) -> str:
    """The name or address in a `Host` header, in lower case and without a final dot; empty if the header is malformed, such as with
    user information.
    """
    found = _HOST.fullmatch(value)
    return "" if found is None else (found[1] or found[2]).lower().removesuffix(".")


@lru_cache(1024)
def is_address(name: str) -> bool:
    """Whether a host is an IP address: no name server is asked for one."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def from_other_site(scope: Scope) -> bool:
    """Whether a browser says that a page of another site sends the request."""
    return header(scope, b"sec-fetch-site") not in ("", "same-origin", "none")


class HostGuard:
    """ASGI middleware: while there are no API keys, answers only requests to an IP address, to `localhost`, to this host's own name,
    or to one of `names`; with `ANY` among these, to all. Health checks always pass. `count` gets each refusal.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, names: Collection[str], count: Callable[[KvRelayError], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._any = ANY in names
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower().removesuffix(".") for name in names)}
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._any or self._keys or b"/" + scope["raw_path"].lstrip(b"/") in _OPEN:
            await self._app(scope, receive, send)
            return
        given = header(scope, b"host")
        name = host_name(given)
        if not given or name in self._names or is_address(name):
            await self._app(scope, receive, send)
            return
        refusal = Forbidden(
            f"this router does not answer to the host {given[:100]!r} of the Host header: name it with --allowed-hosts, or "
            "set API keys"
        )
        self._count(refusal)
        await error_response(refusal, scope, [])(scope, receive, send)
