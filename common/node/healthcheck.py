"""Asks one service whether it is healthy: `python -m common.node.healthcheck ADDRESS`, for health checks of containers.

ADDRESS is a node's control socket (`tcp://HOST:PORT`) or a router (`http://HOST:PORT/health`). A node is healthy if its model
is loaded and its engine loop has recently completed an iteration. If KVRELAY_SSL_CERTFILE is set, as for the router itself, a
router is asked over HTTPS. The exit code is 0 if the service is healthy, else 1 with one line on standard output. Loads
neither torch nor a web framework.
"""

from __future__ import annotations

import asyncio
import http.client
import math
import os
import ssl
import sys
import urllib.error
import urllib.request

from common.base.errors import KvRelayError
from common.config.sources import optional_variable
from common.control.links import Link
from common.control.messages import Message, NodeLoad, Ping, Pong
from common.security.tls import Credentials, open_credentials

TIMEOUT_S = 4.0
MAX_STEP_AGE_S = 60.0
"""A step of a long prompt on a slow processor may take many seconds; a stuck loop never completes another iteration."""


async def node_complaint(
    address: str,
    *,
    timeout_s: float = TIMEOUT_S,
    max_step_age_s: float = MAX_STEP_AGE_S,
    credentials: Credentials | None = None,
) -> str | None:
    """Return the problem of the node behind this control socket; None if it is healthy."""
    answer: asyncio.Future[Pong | str] = asyncio.get_running_loop().create_future()

    def settle(result: Pong | str) -> None:
        if not answer.done():
            answer.set_result(result)

    def on_message(message: Message) -> None:
        if isinstance(message, Pong):
            settle(message)

    link = Link(address, on_message, settle, credentials=credentials)
    try:
        link.send(Ping("probe", lease_s=0.0))
        async with asyncio.timeout(timeout_s):
            pong = await answer
    except TimeoutError:
        return f"{address} did not answer within {timeout_s:g} s"
    finally:
        link.close()
    if isinstance(pong, str):
        return pong
    if pong.load == NodeLoad():  # everything is zero until the node serves
        return f"node {pong.node_id} is still loading its model"
    if not pong.load.step_age_s <= max_step_age_s:
        return f"the engine loop of node {pong.node_id} last completed an iteration {math.ceil(pong.load.step_age_s)} s ago"
    return None


def http_complaint(url: str) -> str | None:
    """Return the problem of the router whose health is at `url`; None if it is healthy."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate names the host that clients ask, not this one.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        # Ignore a proxy that the environment may name.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(url, timeout=TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return f"{url} answers {error.code}: {error.read(500).decode('utf-8', 'replace')}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{url} does not answer: {error}"


def main(arguments: list[str]) -> int:
    """Check one service. Returns the exit code; the reason of a failure is printed to standard output, which container engines
    keep."""
    if len(arguments) != 1 or arguments[0].partition("://")[0] not in ("tcp", "http", "https"):
        print("usage: python -m common.node.healthcheck tcp://HOST:PORT|http://HOST:PORT/health")
        return 2
    address = arguments[0]
    if not address.startswith("tcp://"):
        if optional_variable(os.environ, "ssl_certfile") is not None:  # the router of this container is HTTPS
            address = "https" + address.removeprefix("https").removeprefix("http")
        complaint = http_complaint(address)
    else:
        try:
            credentials = open_credentials(optional_variable(os.environ, "tls_dir"))
            complaint = asyncio.run(node_complaint(address, credentials=credentials))
        except KvRelayError as error:
            complaint = f"{address}: {error}"
    if complaint is not None:
        print(complaint)
    return 0 if complaint is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
