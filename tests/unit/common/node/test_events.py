"""Events in logs, and messages on their way from the engine's thread to the loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from common.config.service_configs import PrefillConfig
from common.control.codec import check, encode, join, split
from common.control.item_count import SENT_ITEMS
from common.control.messages import AttemptKey, PrefillDone, TokenBatch, TokenChunk, TokenLogprobs, items_of
from common.node import server
from common.node.events import ClientLost, FromClient, FromPeer, SendBuffer, ToClient, batches, brief
from common.node.server import NodeServer

CHUNK = TokenChunk(AttemptKey("a", 1), 0, [5])


def test_an_events_line_names_its_kind_and_sender_not_its_content() -> None:
    message = PrefillDone(AttemptKey("x" * 1000, 1), 5)
    assert brief(FromClient(b"17", message)) == "PrefillDone from 17"
    assert brief(FromPeer("a" * 16, message)) == f"PrefillDone from {'a' * 16}"
    assert brief(ClientLost(b"17")) == "ClientLost"


def test_urgent_tokens_are_waited_for_once_after_they_were_handed_over() -> None:
    log = list[Any]()
    buffer = SendBuffer(log.extend, lambda: log.append("waited"))
    sent = ToClient(b"1", TokenBatch([CHUNK]))
    buffer.tokens(b"1", CHUNK)
    buffer.flush()
    assert log == [sent]
    buffer.tokens(b"1", CHUNK, urgent=True)
    buffer.flush()
    buffer.flush()
    assert log == [sent, sent, "waited"]


def test_the_engines_thread_goes_on_once_the_loop_has_sent_urgent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SEND_S", 20.0)

    async def scene() -> None:
        log = list[Any]()
        shell = NodeServer(PrefillConfig(), "prefill-x")
        monkeypatch.setattr(shell, "_reply", lambda *_: log.append("sent"))

        def engine() -> None:
            shell.send_buffer.tokens(b"1", CHUNK, urgent=True)
            shell.send_buffer.flush()
            log.append("went on")

        await asyncio.to_thread(engine)
        assert log == ["sent", "went on"]

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_the_engines_thread_goes_on_if_the_loop_is_busy() -> None:
    async def scene() -> None:
        shell = NodeServer(PrefillConfig(), "prefill-x")
        shell.send_buffer.tokens(b"1", CHUNK, urgent=True)
        thread = threading.Thread(target=shell.send_buffer.flush)
        thread.start()
        thread.join(10)  # holds the loop up
        assert not thread.is_alive()

    asyncio.run(scene())


@pytest.mark.parametrize("count", [1, 100, 3000])
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
