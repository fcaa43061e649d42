"""Calls from a router to the admin ports of nodes. Event loop of the router."""

from __future__ import annotations

import httpx

from common.security.names import host_of
from common.security.tls import Credentials


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
