"""Events in logs."""

from __future__ import annotations

from common.control.messages import AttemptKey, PrefillDone
from common.node.events import ClientLost, FromClient, FromPeer, brief


def test_an_events_line_names_its_kind_and_sender_not_its_content() -> None:
    message = PrefillDone(AttemptKey("x" * 1000, 1), 5)
    assert brief(FromClient(b"17", message)) == "PrefillDone from 17"
    assert brief(FromPeer("a" * 16, message)) == f"PrefillDone from {'a' * 16}"
    assert brief(ClientLost(b"17")) == "ClientLost"
