"""Calls from a router to the admin ports of nodes. Event loop of the router."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx

from common.base.endpoints import is_loopback
from common.base.errors import Unavailable
from common.base.resolve import NameUnknown, is_own, resolve
from common.control.messages import NodeRecord
from common.security.names import host_of
from common.security.tls import Credentials

_RESOLVE_S = 2.0


async def admin_address(record: NodeRecord) -> str:
    """The URL of a node's admin port.

    Raises: Unavailable if it has none, or one on the loopback of another host: the same port here belongs to another
    process, which would get the request and the token.
    """
    address = record.admin_address
    if not address:
        raise Unavailable("it has no admin port: it was started without --admin-token")
    if is_loopback(_host(address)) and not await _is_here(_host(record.peer.control_address)):
        raise Unavailable("its admin port listens on the loopback of its host only: start it with --admin-host")
    return address


async def _is_here(host: str) -> bool:
    try:
        return is_own(await resolve(host, _RESOLVE_S))
    except NameUnknown:
        return False


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def admin_http(token: str, timeout_s: float, tls_dir: str | None) -> httpx.AsyncClient:
    """A client that sends the admin token, and to `https` only if a node of the same authority is there.

    Raises: ConfigError if the files in `tls_dir` cannot be used.
    """
    # No proxy from the environment and no redirects: they would get the token.
    headers = {"Authorization": f"Bearer {token}"}
    if tls_dir is None:
        return httpx.AsyncClient(headers=headers, timeout=timeout_s, trust_env=False)

    async def expect_node(request: httpx.Request) -> None:
        request.extensions["sni_hostname"] = host_of("node")

    return httpx.AsyncClient(
        headers=headers,
        timeout=timeout_s,
        trust_env=False,
        verify=Credentials(tls_dir).for_client(),
        event_hooks={"request": [expect_node]},
    )
