"""Events in logs, and messages of a round of the engine loop."""

from __future__ import annotations

import pytest

from common.control.codec import check, encode, join, split
from common.control.item_count import SENT_ITEMS
from common.control.messages import AttemptKey, PrefillDone, TokenBatch, TokenChunk, TokenLogprobs, items_of
from common.node.events import ClientLost, FromClient, FromPeer, batches, brief


def test_an_events_line_names_its_kind_and_sender_not_its_content() -> None:
    message = PrefillDone(AttemptKey("x" * 1000, 1), 5)
    assert brief(FromClient(b"17", message)) == "PrefillDone from 17"
    assert brief(FromPeer("a" * 16, message)) == f"PrefillDone from {'a' * 16}"
    assert brief(ClientLost(b"17")) == "ClientLost"


@pytest.mark.parametrize("count", [1, 100, 1000])
@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("likely", [None, 0, 20])
def test_the_tokens_of_a_step_pass_in_messages_of_bounded_items(count: int, tokens: int, likely: int | None) -> None:
    tokens = tokens if likely is None else max(1, min(tokens, SENT_ITEMS // items_of(1, likely)))
    each = None if likely is None else TokenLogprobs(-0.25, list(range(70_000, 70_000 + likely)), [-0.5] * likely)
    chunk = TokenChunk(AttemptKey("r", 1), 0, list(range(300, 300 + tokens)), None if each is None else [each] * tokens)
    passed: list[TokenChunk] = []
    for part in batches([chunk] * count):
        [envelope] = split(join([encode(TokenBatch(part))]))
        passed += check(envelope).chunks
    assert passed == [chunk] * count
