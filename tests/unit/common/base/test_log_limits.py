"""A peer that sends nonsense neither fills the log nor hides what others say."""

from __future__ import annotations

import logging

import pytest

from common.base.log_limits import MAX_CHARS, PER_KIND, PER_PEER, WINDOW_S, LimitedHandler


class Collects(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Limited:
    """A logger of its own, whose clock stands."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.out = Collects()
        self.handler = LimitedHandler([self.out], clock=lambda: self.now_s)
        self.log = logging.Logger("test")
        self.log.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.out.lines


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Limited:
    monkeypatch.setattr("threading.Timer.start", lambda self: None)
    return Limited()


def test_a_flood_of_one_kind_gets_some_lines_and_then_a_count(limited: Limited) -> None:
    for number in range(5000):
        limited.log.warning("dropped message %d", number)
    limited.log.warning("something else")
    assert len(limited.lines) == PER_KIND + 1
    limited.now_s = WINDOW_S
    limited.log.info("later")
    assert limited.lines[-2:] == [f"left out {5000 - PER_KIND} lines like this one: dropped message %d", "later"]
    limited.log.warning("dropped message %d", 1)
    assert limited.lines[-1] == "dropped message 1"


def test_one_peers_flood_leaves_room_for_the_same_about_others(limited: Limited) -> None:
    for number in range(1000):
        limited.log.warning("dropped %d", number, extra={"peer": "10.0.0.1"})
    limited.log.warning("dropped %d", -1, extra={"peer": "10.0.0.2"})
    assert len(limited.lines) == PER_PEER + 1
    assert limited.lines[-1] == "dropped -1"


def test_a_peer_of_many_names_gets_no_more_lines_and_no_more_memory(limited: Limited) -> None:
    for number in range(10_000):
        limited.log.warning("dropped", extra={"peer": str(number)})
    assert len(limited.lines) == PER_KIND
    assert len(limited.handler._lines) <= PER_KIND + 2


def test_a_flood_that_ends_is_counted_without_another_line() -> None:
    limited = Limited()
    for _ in range(PER_KIND + 3):
        limited.log.error("broken")
    assert limited.handler._timer is not None
    limited.handler._timer.cancel()
    limited.handler._report_later()
    assert limited.lines[-1] == "left out 3 lines like this one: broken"


def test_what_is_quoted_is_cut(limited: Limited) -> None:
    limited.log.warning("malformed: %s at %d", "x" * 10_000, 7)
    assert limited.lines[-1] == f"malformed: {'x' * 200}... (10000 characters) at 7"
    limited.log.error("failed: %s", ValueError("y" * 10**6))
    assert len(limited.lines[-1]) < MAX_CHARS + 50
    limited.log.info("the %s of an operator", "z" * 300)
    assert "z" * 300 in limited.lines[-1]


def test_debug_lines_are_not_counted(limited: Limited) -> None:
    for _ in range(2 * PER_KIND):
        limited.log.debug("step")
    assert len(limited.lines) == 2 * PER_KIND


def test_a_line_whose_arguments_do_not_fit_is_logged_without_them(limited: Limited) -> None:
    """It once raised in the middle of a service."""
    limited.log.warning("%d and %d", 1)
    limited.log.warning("%d", "text")
    assert limited.lines == ["%d and %d (its arguments do not fit)", "%d (its arguments do not fit)"]
