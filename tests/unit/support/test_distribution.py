"""Tests are distributed in units, and drawn by a text, without losing one."""

from __future__ import annotations

from types import SimpleNamespace

from support.distribution import units
from support.drawn import drawn

SHARED, ALONE = "tests/integration/test_admin.py", "tests/integration/test_up_supervision.py"
COMPUTES = "tests/unit/test_docs.py"


def test_tests_of_a_cluster_or_of_a_unit_test_file_stay_together_and_others_do_not() -> None:
    nodeids = [f"{path}::test_{n}" for path in (SHARED, ALONE, COMPUTES) for n in range(3)]
    found = units(nodeids)
    assert list(found) == nodeids
    assert list(found.values()) == [*[nodeids[0]] * 3, *nodeids[3:6], *[nodeids[6]] * 3]


def test_drawn_orders_differ_keep_a_few_tests_of_a_file_together_and_have_all_of_them() -> None:
    tests = [SimpleNamespace(nodeid=f"{path}::test_{n}") for path in ("a.py", "b.py", "c.py") for n in range(20)]
    first, second = drawn(tests, "one commit"), drawn(tests, "another")
    assert sorted(t.nodeid for t in first) == sorted(t.nodeid for t in second) == sorted(t.nodeid for t in tests)
    assert first != second
    assert first == drawn(tests, "one commit")
    assert {t.nodeid[0] for t in first[:18]} == {"a", "b", "c"}
    assert len({t.nodeid[0] for t in first[:6]}) == 1
