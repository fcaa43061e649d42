"""What the router keeps for the dashboard: bounded, and in words."""

from __future__ import annotations

from router.ui.history import CHANGES, EVERY_S, POINTS, History, NodeView


def test_an_hour_of_points_is_kept_and_no_more() -> None:
    history = History()
    assert history.due_s == 0.0
    for number in range(POINTS + 50):
        history.add(EVERY_S * number, {"answered": number})
    points = history.shown()["points"]
    assert len(points) == POINTS == 3600 / EVERY_S
    assert (points[0]["totals"]["answered"], points[-1]["totals"]["answered"]) == (50, POINTS + 49)
    assert [point["totals"]["answered"] for point in history.shown(2)["points"]] == [POINTS + 48, POINTS + 49]
    assert history.due_s == EVERY_S * (POINTS + 50)


def test_changes_of_nodes_and_other_things_are_told_the_latest_first() -> None:
    history = History()
    usable = NodeView("decode-0", "usable")
    history.compare(1.0, {"a": usable}, {"Redis": "ok"})
    history.compare(2.0, {"a": usable}, {"Redis": "ok"})
    assert history.shown()["changes"] == []
    history.compare(3.0, {"a": NodeView("decode-0", "draining"), "b": NodeView("prefill-0", "usable")}, {"Redis": "ok"})
    history.compare(4.0, {"c": usable}, {"Redis": "gone"})
    assert [(change["time"], change["what"]) for change in history.shown()["changes"]] == [
        (4.0, "Redis: gone, was ok"),
        (4.0, "prefill-0 is gone"),
        (4.0, "decode-0 was restarted"),
        (3.0, "decode-0 is draining, was usable"),
        (3.0, "prefill-0 has joined"),
    ]


def test_changes_are_bounded() -> None:
    history = History()
    for number in range(3 * CHANGES):
        history.compare(float(number), {str(number): NodeView(f"n{number}", "usable")}, {})
    changes = history.shown()["changes"]
    assert len(changes) == CHANGES
    assert changes[0]["time"] == 3 * CHANGES - 1
