"""Which services a rolling restart restarts, and when it would cost requests."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.admin.client import AdminRefused
from kvrelay.admin.roll_plan import KnownService, chosen, gaps, node_service, successor


def node(node_id: str, role: str, incarnation: str, model: str = "m", *, usable: bool = True) -> dict[str, Any]:
    return {"node_id": node_id, "role": role, "incarnation": incarnation, "model": model, "usable": usable}


NODES = [node("p0", "prefill", "i1"), node("d0", "decode", "i2"), node("d1", "decode", "i3")]
ROUTERS = [KnownService("router", "", f"router-{name}", f"router-{name}", f"http://{name}") for name in "ab"]


def names(services: list[KnownService]) -> list[str]:
    return [service.name for service in services]


def test_decode_nodes_come_first_and_routers_last() -> None:
    assert names(chosen([], NODES, ROUTERS)) == ["d0", "d1", "p0", "router-a", "router-b"]


def test_only_the_named_services_are_chosen_and_a_role_means_all_of_it() -> None:
    assert names(chosen(["decode"], NODES, ROUTERS)) == ["d0", "d1"]
    assert names(chosen(["router", "d1"], NODES, ROUTERS)) == ["d1", "router-a", "router-b"]
    assert names(chosen(["router-b", "p"], NODES, ROUTERS)) == ["p0", "router-b"]
    with pytest.raises(AdminRefused, match="one of the routers router-a, router-b"):
        chosen(["router-x"], NODES, ROUTERS)
    with pytest.raises(AdminRefused, match="known: p0"):
        chosen(["x"], NODES, ROUTERS)


def test_the_only_decode_node_or_router_is_a_gap_and_the_only_prefill_node_is_not() -> None:
    assert gaps(chosen([], NODES, ROUTERS), NODES, 2) == []
    one = [NODES[0], NODES[1], {**NODES[2], "usable": False}]
    assert gaps(chosen(["d0", "p0"], one, ROUTERS), one, 2) == ["d0 is the only decode node of m"]
    assert gaps(ROUTERS[:1], NODES, 1) == ["router-a is the only router"]


def test_the_only_node_of_a_model_that_does_not_generate_is_a_gap() -> None:
    nodes = [*NODES, node("e0", "prefill", "i9", "embeds")]
    assert gaps(chosen([], nodes, ROUTERS), nodes, 2) == ["e0 is the only prefill node of embeds"]


def test_the_successor_is_new_usable_and_of_the_same_role_and_model_whatever_its_id() -> None:
    service = node_service(NODES[1])
    before = {each["incarnation"]: each["node_id"] for each in NODES}
    assert successor(service, before, NODES) is None
    others = [
        node("p1", "prefill", "i4"),
        node("d2", "decode", "i5", "other"),
        node("d3", "decode", "i6", usable=False),
        node("d1", "decode", "i8"),  # it died, and is back
    ]
    assert successor(service, before, [*NODES, *others]) is None
    assert successor(service, before, [*NODES, *others, node("d-new", "decode", "i7")]) == "i7"
    assert successor(service, before, [*NODES, *others, node("d0", "decode", "i7")]) == "i7"
