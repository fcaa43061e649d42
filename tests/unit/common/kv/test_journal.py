"""A journal calls back once per request, at the next change or at once if there is something to take."""

from __future__ import annotations

from common.kv.journal import BlockJournal

A, B = b"a" * 16, b"b" * 16


def test_next_change_is_notified_once() -> None:
    journal, calls = BlockJournal(), list[str]()
    journal.notify_once(lambda: calls.append("changed"))
    assert calls == []
    journal.stored(A)
    journal.removed(B)
    assert calls == ["changed"]
    assert journal.take() == ({A}, {B})


def test_changes_that_were_not_taken_are_notified_at_once() -> None:
    journal, calls = BlockJournal(), list[str]()
    journal.removed(A)
    journal.notify_once(lambda: calls.append("changed"))
    assert calls == ["changed"]


def test_cancelled_notification_never_comes() -> None:
    journal, calls = BlockJournal(), list[str]()
    journal.notify_once(lambda: calls.append("changed"))
    journal.notify_once(None)
    journal.stored(A)
    assert calls == []
    journal.take()
    journal.notify_once(lambda: calls.append("later"))
    journal.stored(B)
    assert calls == ["later"]
