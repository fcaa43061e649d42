"""Messages of prefill nodes that come before the router's."""

from __future__ import annotations

from common.control.messages import AttemptKey, PrefillDone
from decode_node.early import EarlyMessages


def done(number: int, token_id: int = 0) -> PrefillDone:
    return PrefillDone(AttemptKey(f"r{number}", 1), token_id)


def test_messages_are_taken_once_in_their_order() -> None:
    early = EarlyMessages(3.0)
    for token_id in (1, 2):
        assert early.keep(b"p", done(0, token_id), now_s=0.0) == []
    assert early.take(done(0).key) == [(b"p", done(0, 1)), (b"p", done(0, 2))]
    assert early.take(done(0).key) == []
    assert not early


def test_an_attempts_messages_expire_together_after_its_first() -> None:
    early = EarlyMessages(3.0)
    early.keep(b"p", done(0, 1), now_s=0.0)
    early.keep(b"p", done(1), now_s=2.0)
    early.keep(b"p", done(0, 2), now_s=2.0)
    assert early.expired(3.0) == []
    assert early.expired(3.5) == [(b"p", done(0, 1)), (b"p", done(0, 2))]
    assert early.expired(5.5) == [(b"p", done(1))]


def test_the_oldest_attempt_makes_room() -> None:
    early = EarlyMessages(3.0)
    for number in range(4096):
        assert early.keep(b"p", done(number), now_s=0.0) == []
    assert early.keep(b"p", done(4096), now_s=0.0) == [(b"p", done(0))]
    assert early.keep(b"p", done(4096, 1), now_s=0.0) == []
    assert len(early) == 4096
