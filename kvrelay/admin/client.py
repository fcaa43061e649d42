"""Client of admin ports for the command line: one blocking request at a time, never through a proxy."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from common.base.errors import ConfigError, KvRelayError
from common.base.resolve import NameUnknown, is_own, resolve_now
from common.cluster.running_clusters import RunningCluster, running_clusters, runtime_folder
from common.config.fields import check_token
from common.config.sources import ADMIN_URL_VARIABLE, ENV_PREFIX, optional_variable
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


TOKEN_VARIABLE = ENV_PREFIX + "ADMIN_TOKEN"
BUDGET_S = 1.4
"""Time for all questions of one command: with the start of the process, no command takes more than two seconds because of
a service that is stopped."""
_PICK_S = 0.6
"""Time in which a cluster's first router must answer; then another one is asked."""
_RESOLVE_S = 0.5
_MAX_ANSWER_BYTES = 256 * 2**20
_MAX_THREADS = 32


class AdminRefused(KvRelayError):
    """The service refused the request or does not know what it names."""


class AdminIncomplete(KvRelayError):
    """Some services did not answer, or refused; `answer` has the others' answers."""

    def __init__(self, message: str, answer: Any, exit_code: int) -> None:
        super().__init__(message)
        self.answer = answer
        self.exit_code = exit_code


class AdminUsage(KvRelayError):
    """The command line is incomplete or wrong."""

    exit_code = 2


class AdminUnreachable(KvRelayError):
    """No service answers at the address."""

    exit_code = 3


AnswerT = TypeVar("AnswerT")


class AdminClient:
    """Client of the admin ports of one cluster. `url` is a router's admin address; it knows those of the nodes.

    All its questions together may take `budget_s`, except those with a `timeout_s` of their own. Any thread.
    """

    def __init__(self, url: str, token: str, budget_s: float = BUDGET_S, tls_dir: str | None = None) -> None:
        """tls_dir: certificates for admin ports that are HTTPS. Raises: ConfigError if they cannot be used."""
        self.url = url.rstrip("/")
        self.token = token
        self._until_s = time.monotonic() + budget_s
        self._opener = admin_opener(tls_dir)

    def get(self, path: str, *, base: str | None = None, timeout_s: float | None = None) -> Any:
        """GET from the router, or from the service with the admin URL `base`.

        Raises: AdminRefused, AdminUnreachable.
        """
        return self._ask("GET", path, None, base or self.url, timeout_s)

    def post(
        self, path: str, body: Mapping[str, Any], *, base: str | None = None, timeout_s: float | None = None
    ) -> Any:
        """POST a JSON body. Raises: what `get` raises."""
        return self._ask("POST", path, json.dumps(body).encode(), base or self.url, timeout_s)

    def node(self, name: str) -> dict[str, Any]:
        """The node whose id or incarnation is `name` or begins with it.

        Raises: AdminRefused if there is none, or more than one.
        """
        return pick_node(self.get("/nodes")["nodes"], name)

    def address_of(self, known: Mapping[str, Any]) -> str:
        """The admin URL of a node that `node` returned.

        Raises: AdminRefused if it has none, or a loopback address of another host: the token would go to whatever
        listens on that port of this host.
        """
        address = str(known["admin_address"])
        if not address:
            raise AdminRefused(f"{known['node_id']} has no admin port: it was started without --admin-token")
        if _is_local(address) and not (_is_local(self.url) and _is_here(known)):
            raise AdminRefused(
                f"the admin port of {known['node_id']} listens on the loopback of its host only: start it with --admin-host"
            )
        return address

    def of_each(
        self, nodes: Sequence[Mapping[str, Any]], ask: Callable[[str], AnswerT]
    ) -> tuple[dict[str, AnswerT], dict[str, KvRelayError]]:
        """Call `ask` with the admin URL of each node, all at once. Returns the answers and the errors, by node id."""

        def answer(node: Mapping[str, Any]) -> AnswerT | KvRelayError:
            try:
                return ask(self.address_of(node))
            except (AdminRefused, AdminUnreachable) as error:
                return error

        with ThreadPoolExecutor(_MAX_THREADS) as threads:
            found = dict(zip([str(node["node_id"]) for node in nodes], threads.map(answer, nodes), strict=True))
        failed = {name: each for name, each in found.items() if isinstance(each, KvRelayError)}
        return {name: each for name, each in found.items() if not isinstance(each, KvRelayError)}, failed

    def _ask(self, method: str, path: str, data: bytes | None, base: str, timeout_s: float | None) -> Any:
        if not _is_url(base):  # a node's record may name anything, such as a file
            raise AdminUnreachable(f"{base[:200]!r} is not the URL of an admin port")
        if timeout_s is None:
            timeout_s = max(0.05, self._until_s - time.monotonic())
        headers: dict[str, Any] = {
            "Authorization": f"Bearer {self.token}".encode(),  # bytes: header text could not be UTF-8
            "Content-Type": "application/json",
        }
        try:
            request = urllib.request.Request(base + path, data, headers, method=method)  # noqa: S310 - checked above
            with self._opener.open(request, timeout=timeout_s) as answer:
                content = answer.read(_MAX_ANSWER_BYTES)
                return json.loads(content) if answer.headers.get_content_type() == "application/json" else content
        except urllib.error.HTTPError as error:
            with error:
                raise AdminRefused(_refusal(error)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = f"nothing within {timeout_s:.1f} s" if isinstance(reason, TimeoutError) else reason
            raise AdminUnreachable(f"{base} does not answer: {why}") from None


def _is_local(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_here(node: Mapping[str, Any]) -> bool:
    """Whether the node listens at an address of this host."""
    try:
        return is_own(resolve_now(urllib.parse.urlsplit(str(node["control_address"])).hostname or "", _RESOLVE_S))
    except NameUnknown:
        return False


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        found = json.loads(error.read(65536))["error"]
        if "type" not in found:  # it is in errors of the API, which knows none of these paths and not this token
            return str(found["message"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return f"{error.url} answers {error.code}: is that an admin port?"


def pick_node(nodes: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The node with the id or incarnation `name`, or with a unique prefix of either.

    Raises: AdminRefused; AdminUsage for an empty name, with which every id begins.
    """
    if not name:
        raise AdminUsage("the name of the node is empty")
    for matches in (str.__eq__, str.startswith):
        matching = [node for node in nodes if matches(node["node_id"], name) or matches(node["incarnation"], name)]
        # A restarted node is listed twice until the router has forgotten the old incarnation.
        matching = [node for node in matching if node["usable"]] or matching
        if len(matching) == 1 or (matching and len({node["node_id"] for node in matching}) == 1):
            return matching[-1]
        if matching:
            raise AdminRefused(f"{name!r} could be {', '.join(sorted(node['node_id'] for node in matching))}")
    known = ", ".join(node["node_id"] for node in nodes) or "none"
    raise AdminRefused(f"the router knows no node {name!r}; known: {known}")


def connect(url: str | None, environ: Mapping[str, str]) -> AdminClient:
    """A client for the cluster named by the command line, the environment, or a `kvrelay up` of this user, in this order.

    `url`: of one router or several, separated by commas. Of several routers it asks the first that answers.

    Raises: AdminUsage, AdminUnreachable.
    """
    admin_urls, token = _named(url, environ)
    tls_dir = optional_variable(environ, "tls_dir")
    return AdminClient(_first_that_answers(admin_urls, token, tls_dir), token, tls_dir=tls_dir)


def router_urls(url: str | None, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """The admin URLs of all routers of that cluster, as far as this machine knows, and the token. Raises: what `connect` raises."""
    given, token = _named(url, environ)
    for cluster in running_clusters(runtime_folder(environ)):
        own = list(cluster.routers.values())
        if set(given) & set(own):
            return [*own, *(each for each in given if each not in own)], token
    return given, token


def _named(url: str | None, environ: Mapping[str, str]) -> tuple[list[str], str]:
    url = url or environ.get(ADMIN_URL_VARIABLE) or None
    token = environ.get(TOKEN_VARIABLE) or None
    if token is not None:
        try:
            check_token(token)
        except ConfigError as error:
            raise AdminUsage(f"{TOKEN_VARIABLE}: {error.message}") from None
    urls = [] if url is None else [each.strip().rstrip("/") for each in url.split(",")]
    for each in urls:
        if not _is_url(each):
            raise AdminUsage(f"{each!r} is not a URL such as http://10.0.0.5:8001")
    clusters = running_clusters(runtime_folder(environ))
    if not urls:
        admin_urls, own_token = _only_cluster(clusters)
        return admin_urls, token or own_token
    found = [_on_this_machine(clusters, each) for each in urls]
    if token is None:
        for each, (_, own_token) in zip(urls, found, strict=True):
            if not own_token:
                raise AdminUsage(
                    f"no `kvrelay up` of this user is at {each}: set {TOKEN_VARIABLE} to the cluster's admin token"
                )
    return list(dict.fromkeys(admin_url for admin_url, _ in found)), token or found[0][1]


def _on_this_machine(clusters: list[RunningCluster], url: str) -> tuple[str, str]:
    """The admin URL of the router that has `url` for its clients or for its admin port, and its cluster's token; `url` and "" if
    it is none of this user's `kvrelay up`."""
    for each in (url, url.replace("//localhost:", "//127.0.0.1:")):
        for cluster in clusters:
            if each in cluster.routers or each in cluster.routers.values():
                return cluster.routers.get(each, each), cluster.token
    return url, ""


def _is_url(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port >= 0)
    except ValueError:  # unbalanced bracket, or a port that is none: http.client would take the rest of 65536
        return False


def _only_cluster(clusters: list[RunningCluster]) -> tuple[list[str], str]:
    """Admin URLs of all routers of the only cluster, and its token."""
    if not clusters:
        raise AdminUnreachable(
            f"no `kvrelay up` of this user runs on this machine; for another cluster give --url (a router's admin "
            f"address) and set {TOKEN_VARIABLE}"
        )
    if len(clusters) > 1:
        raise AdminUsage(
            f"{len(clusters)} clusters of this user run here: choose one, as in `kvrelay admin nodes --url "
            f"{clusters[0].url}`; they are {', '.join(f'{each.url} (pid {each.pid})' for each in clusters)}"
        )
    return list(clusters[0].routers.values()), clusters[0].token


def _first_that_answers(admin_urls: list[str], token: str, tls_dir: str | None) -> str:
    """The first router that answers within `_PICK_S`; the first of all if none does."""
    if len(admin_urls) == 1:
        return admin_urls[0]

    def answers(url: str) -> bool:
        try:
            AdminClient(url, token, _PICK_S, tls_dir).get("/status")
        except (AdminRefused, AdminUnreachable):
            return False
        return True

    with ThreadPoolExecutor(len(admin_urls)) as threads:
        return next(
            (url for url, ok in zip(admin_urls, threads.map(answers, admin_urls), strict=True) if ok), admin_urls[0]
        )
