"""`kvrelay admin check`: asks every service about itself and reports what is wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from kvrelay.admin.client import AdminRefused, AdminUnreachable, connect, router_urls
from kvrelay.admin.options import Json, Url, print_answer
from router.findings import ServiceReport, find

_FOUND = 1
"""Exit code where something was found."""


def check(url: Url = None, as_json: Json = False) -> None:
    """Look for what is wrong: connections, versions, fingerprints, clocks, Redis, descriptors, memory, GPUs.

    Each finding comes with its remedy. Exit code 1 if something was found, 3 if no router answers.
    """
    routers, nodes = examine(url)
    found = find(routers, nodes, own_version())
    about = {"routers": len(routers), "nodes": len(nodes), "findings": [each._asdict() for each in found]}
    print_answer(about, as_json, lambda show, answer: show.findings(answer))
    if found:
        raise typer.Exit(_FOUND)


def own_version() -> str:
    """The version of kvrelay that runs this command."""
    try:
        return version("kvrelay")
    except PackageNotFoundError:
        return ""


def examine(url: str | None) -> tuple[list[ServiceReport], list[ServiceReport]]:
    """Ask all routers and nodes at once. Raises: AdminUnreachable if no router answers."""
    client = connect(url, os.environ)
    listed = sorted(client.get("/nodes")["nodes"], key=lambda node: bool(node["usable"]))
    known = {str(node["node_id"]): node for node in listed}  # of a restarted node the incarnation that is usable
    places = {name: _tcp_addresses(node) for name, node in known.items()}
    addresses = [address for each in places.values() for address in each]
    urls, _ = router_urls(url, os.environ)

    def ask(service: ServiceReport) -> ServiceReport:
        """Fill in what the service says. A router has its address as its name until it has answered."""
        try:
            is_router = service.role == "router"
            base = service.name if is_router else client.address_of(service.known)
            service.status = client.get("/status", base=base)
            if is_router:
                service.name = str(service.status["router_id"])
            dial = [each for each in addresses if each not in places.get(service.name, ())]
            before_s = time.time()
            service.facts = client.post("/facts", {"dial": dial}, base=base)
            after_s, then_s = time.time(), float(service.facts["time"])
            service.skew_s = max(0.0, then_s - after_s) or min(0.0, then_s - before_s)
        except (AdminUnreachable, AdminRefused) as error:
            service.silent, service.closed = error.message, isinstance(error, AdminRefused)
        return service

    with ThreadPoolExecutor(max(1, min(32, len(urls) + len(known)))) as threads:
        routers = threads.map(ask, [ServiceReport(url, "router") for url in urls])
        nodes = threads.map(ask, [ServiceReport(name, str(node["role"]), known=node) for name, node in known.items()])
        return list(routers), list(nodes)


def _tcp_addresses(node: Mapping[str, Any]) -> list[str]:
    """Where others connect to a node: its control address and the addresses that take KV over TCP."""
    data = " ".join(node["data_addresses"]).split()
    return [node["control_address"], *(address for address in data if "+tcp://" in address)]
