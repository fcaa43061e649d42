from __future__ import annotations

from typing import Any

import pytest

from kvrelay.admin.client import AdminRefused, AdminUsage
from kvrelay.admin.flip import RoleKept, changed, check_others, in_order
from kvrelay.admin.roll_plan import node_service


def node(name: str, role: str, *, usable: bool = True, task: str = "generate", incarnation: str = "") -> dict[str, Any]:
    return {
        "node_id": name,
        "role": role,
        "model": "m",
        "usable": usable,
        "task": task,
        "incarnation": incarnation or f"of-{name}",
    }


def test_the_role_with_more_nodes_gives_one_first() -> None:
    nodes = [node("p0", "prefill"), node("d0", "decode"), node("d1", "decode")]
    picked = [node_service(nodes[0]), node_service(nodes[2])]
    assert [each.name for each in in_order(picked, nodes)] == ["d1", "p0"]
    with pytest.raises(AdminUsage, match="d0 and d1 cannot change places"):
        in_order([node_service(nodes[1]), node_service(nodes[2])], nodes)
    with pytest.raises(AdminUsage, match="name one node"):
        in_order(picked * 2, nodes)
    pooling = [node("p0", "prefill", task="embed")]
    with pytest.raises(AdminRefused, match="p0 does not generate"):
        in_order([node_service(pooling[0])], pooling)


def test_the_last_usable_node_of_a_role_keeps_it() -> None:
    nodes = [node("p0", "prefill"), node("p1", "prefill", usable=False), node("d0", "decode")]
    with pytest.raises(AdminRefused, match="p0 is the only usable prefill node of m"):
        check_others(node_service(nodes[0]), nodes)


def test_a_node_has_changed_when_it_is_usable_in_its_new_role() -> None:
    old = node_service(node("p0", "prefill"))
    assert changed(old, [node("p0", "prefill")]) is None
    assert changed(old, [node("p0", "prefill"), node("p0", "decode", usable=False, incarnation="new")]) is None
    assert changed(old, [node("p0", "decode", incarnation="new")]) == "new"
    with pytest.raises(RoleKept, match="p0 ended while it changed its role, and is a prefill node again"):
        changed(old, [node("p0", "prefill", incarnation="new")])
