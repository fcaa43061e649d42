"""Which services a rolling restart restarts, in which order, and whether requests would fail meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.admin.client import AdminRefused, pick_node

_ORDER = {"decode": 0, "prefill": 1, "router": 2}


@dataclass(frozen=True)
class RestartedService:
    """One process to restart."""

    role: str
    """router, prefill or decode."""
    model: str
    """The model; empty for a router."""
    name: str
    """Node id or router id."""
    incarnation: str
    """The incarnation, which is new at every start; for a router its id, which is new as well."""
    address: str
    """Admin URL."""


def router_service(status: Mapping[str, Any], address: str) -> RestartedService:
    """The service behind a router's status."""
    name = str(status["router_id"])
    return RestartedService("router", "", name, name, address)


def node_service(known: Mapping[str, Any], address: str) -> RestartedService:
    """The service behind a node that a router lists."""
    return RestartedService(known["role"], known["model"], known["node_id"], known["incarnation"], address)


def chosen(
    names: Sequence[str], nodes: list[dict[str, Any]], routers: Sequence[RestartedService]
) -> list[RestartedService]:
    """The services that `names` name, all if there are none, in the order of their restart: decode nodes, prefill nodes,
    routers. A name is a role, which means all services of it, or the id of a service or the beginning of one.

    Nodes come without an address.

    Raises: AdminRefused for a name that is unknown or ambiguous.
    """
    known = [*(node_service(node, "") for node in nodes), *routers]
    picked = set(known) if not names else {each for name in names for each in _named(name, known, nodes)}
    return sorted(picked, key=lambda service: (_ORDER[service.role], service.name))


def _named(name: str, known: Sequence[RestartedService], nodes: list[dict[str, Any]]) -> list[RestartedService]:
    if name in _ORDER:
        return [service for service in known if service.role == name]
    if name.startswith("router"):
        found = [service for service in known if service.role == "router" and service.name.startswith(name)]
        if len(found) != 1:
            routers = ", ".join(service.name for service in known if service.role == "router")
            raise AdminRefused(f"{name!r} is not one of the routers {routers}")
        return found
    incarnation = pick_node(nodes, name)["incarnation"]
    return [service for service in known if service.incarnation == incarnation]


def gaps(services: Sequence[RestartedService], nodes: Sequence[Mapping[str, Any]], num_routers: int) -> list[str]:
    """Why requests would fail while these services restart: one sentence for each service that is the only one of its kind.

    A model's only prefill node is none if the model has decode nodes: they compute prompts meanwhile.
    """
    found: list[str] = []
    for service in services:
        others = [node for node in nodes if node["usable"] and node["incarnation"] != service.incarnation]
        roles = {node["role"] for node in others if node["model"] == service.model}
        if service.role == "router":
            if num_routers == 1:
                found.append(f"{service.name} is the only router")
        elif service.role not in roles and "decode" not in roles:
            found.append(f"{service.name} is the only {service.role} node of {service.model}")
    return found


def successor(service: RestartedService, before: Mapping[str, str], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """The incarnation of the usable node that has taken the service's place: one of its role and model that is not in
    `before`, incarnations with their ids. A node's id may change with its start, but another known node that has restarted
    meanwhile is not it."""
    others = {name for name in before.values() if name != service.name}
    for node in nodes:
        same = (node["role"], node["model"]) == (service.role, service.model)
        if same and node["usable"] and node["incarnation"] not in before and node["node_id"] not in others:
            return str(node["incarnation"])
    return None
