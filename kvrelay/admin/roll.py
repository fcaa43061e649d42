"""`kvrelay admin roll`: restarts services one after the other while the others serve."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer

from common.base.errors import DeadlineExceeded
from common.config.sources import optional_variable
from kvrelay.admin.client import AdminClient, AdminRefused, AdminUnreachable, router_urls
from kvrelay.admin.options import Json, StartTimeout, Url, print_answer, say, seconds_option
from kvrelay.admin.roll_plan import KnownService, chosen, gaps, router_service, successor

_POLL_S = 0.25
_SAY_S = 5.0
FoundT = TypeVar("FoundT")


class ReachedCluster:
    """All routers of a cluster and the nodes that they know.

    Raises: AdminUnreachable while a router does not answer.
    """

    def __init__(self, url: str | None) -> None:
        self._urls, self._token = router_urls(url, os.environ)

    def client(self, url: str) -> AdminClient:
        """A client with a budget of its own."""
        return AdminClient(url, self._token, tls_dir=optional_variable(os.environ, "tls_dir"))

    def routers(self) -> list[KnownService]:
        """The routers at all addresses of the given names."""
        found: dict[str, KnownService] = {}
        for url in self._urls:
            for address in _addresses(url):
                service = router_service(self.client(address).get("/status"), address)
                found.setdefault(service.name, service)
        return list(found.values())

    def nodes(self, router: KnownService) -> list[dict[str, Any]]:
        """The nodes as one router sees them."""
        return self.client(router.address).get("/nodes")["nodes"]


def _addresses(url: str) -> list[str]:
    """The URL with each address of its host name; a service of several containers has one address for each. IPv6 addresses
    are used only if there are no others."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, UnicodeError):  # UnicodeError: not a valid host name
            found = socket.getaddrinfo(parts.hostname, port, family, socket.SOCK_STREAM)
            hosts = sorted({str(entry[4][0]) for entry in found})
            return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]
    return [url]


def roll(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Only these: ids, or decode, prefill, router for all of a role."),
    ] = None,
    timeout_s: Annotated[
        float, seconds_option("--timeout", "Seconds for the requests of a service to end before it restarts.")
    ] = 600.0,
    start_timeout_s: StartTimeout = 300.0,
    grace_s: Annotated[
        float,
        seconds_option(
            "--grace",
            "Seconds between a router's failing health check and its first refusal: as long as a load balancer takes.",
        ),
    ] = 0.0,
    force: Annotated[
        bool, typer.Option("--force", help="Also restart a service that is the only one of its kind.")
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Restart every service, one after the other, each when its requests have ended and while the others serve.

    Decode nodes first, then prefill nodes, then routers. Each ends with exit code 75; `kvrelay up`, a container's restart
    policy or systemd starts it again.
    """
    done = Roll(ReachedCluster(url), timeout_s, start_timeout_s, grace_s).run(names or [], force=force)
    print_answer(done, as_json, lambda show, rows: show.records("restarted", rows))


class Roll:
    """One rolling restart."""

    def __init__(self, cluster: ReachedCluster, timeout_s: float, start_timeout_s: float, grace_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s

    def run(self, names: Sequence[str], *, force: bool) -> list[dict[str, Any]]:
        """Restart the services named, or all. Returns a row for each.

        Raises: AdminRefused, AdminUnreachable, DeadlineExceeded; the services not restarted yet are left as they are.
        """
        routers = self._cluster.routers()
        nodes = self._cluster.nodes(routers[0])
        services = chosen(names, nodes, routers)
        if not force:
            _refuse(gaps(services, nodes, len(routers)), "" if names else "name others to restart these alone, ")
        reached = self._cluster.client(routers[0].address)
        rows: list[dict[str, Any]] = []
        for service in services:
            address = service.address
            if service.role != "router":
                now = self._cluster.nodes(routers[0])
                if not force:  # another one may have died since
                    _refuse(gaps([service], now, len(routers)))
                known = next((node for node in now if node["incarnation"] == service.incarnation), None)
                if known is None:
                    raise AdminRefused(
                        f"{service.name} has ended, or restarted by itself, since this began: run it again"
                    )
                address = reached.address_of(known)
            rows.append(self._restart(service, address))
        return rows

    def _restart(self, service: KnownService, address: str) -> dict[str, Any]:
        started_s = time.monotonic()
        find = self._new_router(service) if service.role == "router" else self._new_node(service)
        body = {"timeout_s": self._timeout_s, "grace_s": self._grace_s}
        self._cluster.client(address).post("/restart", body)
        limit_s = self._grace_s + self._timeout_s + self._start_timeout_s
        say(f"{service.name}: finishes its requests")
        new = poll(find, limit_s, service.name)
        took_s = round(time.monotonic() - started_s, 1)
        say(f"{service.name}: restarted in {took_s:g} s")
        return {
            "service": service.name,
            "role": service.role,
            "seconds": took_s,
            "before": service.incarnation,
            "now": new,
        }

    def _new_node(self, service: KnownService) -> Callable[[], str | None]:
        """A function that returns the incarnation of the node's successor once every router can use it, None before."""
        nodes = self._cluster.nodes(self._cluster.routers()[0])
        before = {node["incarnation"]: node["node_id"] for node in nodes}

        def find() -> str | None:
            seen = {successor(service, before, self._cluster.nodes(router)) for router in self._cluster.routers()}
            return seen.pop() if len(seen) == 1 else None

        return find

    def _new_router(self, service: KnownService) -> Callable[[], str | None]:
        """A function that returns the name of this router's successor once it can use as many nodes, None before."""
        before = self._cluster.routers()
        usable = _usable(self._cluster.nodes(service))

        def find() -> str | None:
            now = self._cluster.routers()
            new = [router for router in now if router.name not in {each.name for each in before}]
            if len(now) < len(before) or not new or _usable(self._cluster.nodes(new[0])) < usable:
                return None
            return new[0].name

        return find


def _refuse(gaps: Sequence[str], choice: str = "") -> None:
    """Raises: AdminRefused if there are any."""
    if gaps:
        raise AdminRefused(
            f"requests would fail: {'; '.join(gaps)}. Start another one first, {choice}or accept it with --force"
        )


def _usable(nodes: Sequence[dict[str, Any]]) -> int:
    return sum(bool(node["usable"]) for node in nodes)


def poll(
    find: Callable[[], FoundT | None], limit_s: float, name: str, refusal: type[AdminRefused] | tuple[()] = ()
) -> FoundT:
    """Call `find` until it returns something. Errors of a service that is gone for now are ignored, except a `refusal`.

    Raises: DeadlineExceeded, `refusal`.
    """
    started_s = said_s = time.monotonic()
    while True:
        try:
            found = find()
        except refusal:
            raise
        except (AdminUnreachable, AdminRefused):
            found = None
        if found is not None:
            return found
        now_s = time.monotonic()
        if now_s - started_s > limit_s:
            raise DeadlineExceeded(
                f"{name} is not back within {limit_s:g} s: is it run by `kvrelay up`, a container with a restart policy, or "
                "systemd with Restart=always?"
            )
        if now_s - said_s > _SAY_S:
            said_s = now_s
            say(f"{name}: not back yet ({now_s - started_s:.0f} of {limit_s:.0f} s)")
        time.sleep(_POLL_S)
