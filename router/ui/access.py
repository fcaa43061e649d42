"""Who may call the dashboard's JSON routes. Pure.

Reading and chatting on the public port are as open as the API there. Changing a node needs the admin token, or a caller on
this host while `kvrelay up` runs the router; killing a node needs the latter. All but reading needs a header that pages of
other sites cannot send.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from common.base.endpoints import is_loopback
from common.base.errors import Forbidden, Unauthorized
from common.cluster.running_clusters import running_clusters
from router.http.hosts import host_name

_SET_BY_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
ACTION_HEADER = "x-kvrelay-ui"
"""Set by the pages. A browser sends it to another site only after a preflight, which the router does not answer."""


@dataclass(frozen=True)
class Access:
    """The rules. `admin_token`: "" without one."""

    admin_token: str = ""
    trusts_loopback: bool = False
    """`kvrelay up` runs this router: its user is on this host."""
    open: bool = True
    """Reading needs no token; False on the admin port."""

    def check(self, scope: Scope) -> None:
        """Raises: Unauthorized, Forbidden if this call is not admitted."""
        headers = Headers(scope=scope)
        if scope["method"] in ("GET", "HEAD"):
            if not self.open and not self._has_token(headers):
                raise Unauthorized("the admin token is missing or wrong")
            return
        _check_site(headers)
        if not self.may_operate(scope):
            raise Unauthorized("the admin token is missing or wrong")

    def check_chat(self, scope: Scope) -> None:
        """Admit callers to the playground's chat: on a public port without keys all. Raises: Unauthorized, Forbidden."""
        _check_site(Headers(scope=scope))
        if not self.open and not self.may_operate(scope):
            raise Unauthorized("the admin token is missing or wrong")

    def may_kill(self, scope: Scope) -> bool:
        """Whether the caller may kill nodes: only the user of a `kvrelay up` on this host."""
        return self.trusts_loopback and is_local(scope)

    def may_operate(self, scope: Scope) -> bool:
        """Whether the caller may change nodes, and see what they report to operators."""
        return (self.trusts_loopback and is_local(scope)) or self._has_token(Headers(scope=scope))

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.encode("latin-1").strip(b" \t"), self.admin_token.encode())
        return bool(self.admin_token) and right and scheme.lower() == "bearer"


def is_local(scope: Scope) -> bool:
    """Whether the caller is on this host and addresses it by a local name.

    A page of another site whose name was rebound to this host uses that name. What a proxy on this host forwards may come from
    anywhere.
    """
    headers, client = Headers(scope=scope), scope.get("client")
    host = host_name(headers.get("host", ""))
    by_proxy = any(name in headers for name in _SET_BY_PROXIES)
    return client is not None and is_loopback(client[0]) and is_loopback(host) and not by_proxy


def trusts_loopback(parent_pid: int, folder: Path) -> bool:
    """Whether the parent process is a `kvrelay up`, by its file in `folder` (`runtime_folder`)."""
    return any(cluster.pid == parent_pid for cluster in running_clusters(folder))


def _check_site(headers: Headers) -> None:
    origin = headers.get("origin")
    if not (
        headers.get(ACTION_HEADER) == "1"
        and headers.get("sec-fetch-site", "same-origin") == "same-origin"
        and (origin is None or urlsplit(origin).netloc == headers.get("host"))
    ):
        raise Forbidden("only a page of this dashboard may do this")
