"""Which services a rolling restart restarts, in which order, and whether requests would fail meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.admin.client import AdminRefused, pick_node

_ORDER = {"decode": 0, "prefill": 1, "router": 2}


@dataclass(frozen=True)
class KnownService:
    """One process of a cluster, as it was before a restart or a change of its role."""

    role: str
    """router, prefill or decode."""
    model: str
    """The model; empty for a router."""
    name: str
    """Node id or router id."""
    incarnation: str
    """The incarnation, which is new at every start; for a router its id, which is new as well."""
    address: str = ""
    """Admin URL; routers only."""


def router_service(status: Mapping[str, Any], address: str) -> KnownService:
    """The service behind a router's status."""
    name = str(status["router_id"])
    return KnownService("router", "", name, name, address)


def node_service(known: Mapping[str, Any]) -> KnownService:
    """The service behind a node that a router lists."""
    return KnownService(known["role"], known["model"], known["node_id"], known["incarnation"])


def chosen(names: Sequence[str], nodes: list[dict[str, Any]], routers: Sequence[KnownService]) -> list[KnownService]:
    """The services that `names` name, all if there are none, in the order of their restart: decode nodes, prefill nodes,
    routers. A name is a role, which means all services of it, or the id of a service or the beginning of one.

    Raises: AdminRefused for a name that is unknown or ambiguous.
    """
    known = [*map(node_service, nodes), *routers]
    picked = set(known) if not names else {each for name in names for each in _named(name, known, nodes)}
    return sorted(picked, key=lambda service: (_ORDER[service.role], service.name))


def _named(name: str, known: Sequence[KnownService], nodes: list[dict[str, Any]]) -> list[KnownService]:
    if name in _ORDER:
        return [service for service in known if service.role == name]
    if name.startswith("router"):
        routers = [service for service in known if service.role == "router"]
        found = [service for service in routers if service.name.startswith(name)]
        if len(found) != 1:
            raise AdminRefused(f"{name!r} is not one of the routers {', '.join(each.name for each in routers)}")
        return found
    return [node_service(pick_node(nodes, name))]


def gaps(services: Sequence[KnownService], nodes: Sequence[Mapping[str, Any]], num_routers: int) -> list[str]:
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


def successor(service: KnownService, before: Mapping[str, str], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """The incarnation of the usable node that has taken the service's place: one of its role and model that is not in
    `before`, incarnations with their ids. A node's id may change with its start, but another known node that has restarted
    meanwhile is not it."""
    others = {name for name in before.values() if name != service.name}
    for node in nodes:
        same = (node["role"], node["model"]) == (service.role, service.model)
        if same and node["usable"] and node["incarnation"] not in before and node["node_id"] not in others:
            return str(node["incarnation"])
    return None
