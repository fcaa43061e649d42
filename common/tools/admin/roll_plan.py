"""Which services a rolling restart restarts, in which order, and whether requests would fail meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.tools.admin.client import AdminRefused, pick_node


@dataclass(frozen=True)
class Service:
    """One process to restart."""

    role: str
    """router, prefill or decode."""
    model: str
    """Empty for a router."""
    name: str
    """Node id or router id."""
    incarnation: str
    """Other at every start; of a router its id, which is new at every start."""
    address: str
    """Admin URL."""


def router_service(status: Mapping[str, Any], address: str) -> Service:
    """The service behind a router's status."""
    name = str(status["router_id"])
    return Service("router", "", name, name, address)


def node_service(known: Mapping[str, Any], address: str) -> Service:
    """The service behind a node that a router lists."""
    return Service(known["role"], known["model"], known["node_id"], known["incarnation"], address)


def chosen(names: Sequence[str], nodes: list[dict[str, Any]], routers: Sequence[Service]) -> list[Service]:
    """The services that `names` name, all if there are none: decode nodes, then prefill nodes, then routers, which the
    command itself asks. `router` names every router, else ids do. Nodes without address: `address` is theirs to fill.

    Raises: AdminRefused for a name that is unknown or ambiguous.
    """
    known = [node_service(node, "") for node in nodes]
    if names:
        wanted = {pick_node(nodes, name)["incarnation"] for name in names if not name.startswith("router")}
        picked = [service for service in known if service.incarnation in wanted]
        for name in names:
            found = [router for router in routers if name.startswith("router") and router.name.startswith(name)]
            if name.startswith("router") and not found:
                raise AdminRefused(f"no router is named {name!r}; known: {', '.join(each.name for each in routers)}")
            picked += [router for router in found if router not in picked]
    else:
        picked = [*known, *routers]
    order = {"decode": 0, "prefill": 1, "router": 2}
    return sorted(picked, key=lambda service: (order[service.role], service.name))


def gaps(services: Sequence[Service], nodes: Sequence[Mapping[str, Any]], num_routers: int) -> list[str]:
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


def successor(service: Service, before: set[str], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """The incarnation of the usable node that has taken the service's place: one of its role and model that is not in
    `before`. A node's id may change with its start."""
    for node in nodes:
        same = (node["role"], node["model"]) == (service.role, service.model)
        if same and node["usable"] and node["incarnation"] not in before:
            return str(node["incarnation"])
    return None
