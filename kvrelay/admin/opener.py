"""Opens the URLs of admin ports, over TLS only where a router or node of the same authority is at the other end."""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from typing import Any

from common.security.tls import Credentials, shows_role


def admin_opener(tls_dir: str | None) -> urllib.request.OpenerDirector:
    """An opener without proxies from the environment and without redirects: they would get the token.

    Raises: ConfigError if the files in `tls_dir` cannot be used.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirection()]
    if tls_dir is not None:
        handlers.append(_Https(Credentials(tls_dir).for_client()))
    return urllib.request.build_opener(*handlers)


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        context.check_hostname = False  # certificates name roles, which `_Connection` checks
        self._secured = context

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req, context=self._secured)


class _Connection(http.client.HTTPSConnection):
    def connect(self) -> None:
        """Raises: ssl.SSLError unless a router or a node answers."""
        super().connect()
        if not isinstance(self.sock, ssl.SSLSocket) or not shows_role(self.sock, ("router", "node")):
            self.sock.close()
            raise ssl.SSLError("its certificate is of neither a router nor a node")
