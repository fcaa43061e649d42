"""Whatever somebody begins at a node ends with that somebody, also when it never said that it lives."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.redis_server import RedisServer

from common.config.service_configs import DecodeConfig
from common.control.codec import MAX_MESSAGE_BYTES
from common.control.links import Link
from common.control.messages import Abort, AttemptFailed, AttemptKey, Message, Ping, TokenBatch, TokenChunk
from common.control.pooling import PoolResult
from common.node.events import ClientLost, FromClient, ToClient
from common.node.server import NodeServer


def test_an_answer_that_is_too_large_is_a_failure_at_once(redis_server: RedisServer) -> None:
    async def main() -> list[Message]:
        shell = NodeServer(DecodeConfig(node_id="decode-x", redis_url=redis_server.url))
        await shell.bind()
        asked, got = asyncio.Event(), list[Message]()
        shell._engine = SimpleNamespace(post=lambda event: asked.set())  # type: ignore[assignment]
        link = Link(shell.me.control_address, got.append, print)
        key = AttemptKey("large", 1)
        try:
            link.send(Abort(key))
            async with asyncio.timeout(20):
                await asked.wait()
                (identity,) = shell.leases
                shell._deliver([ToClient(identity, PoolResult(key, [bytes(MAX_MESSAGE_BYTES)]))])
                while not got:
                    await asyncio.sleep(0.01)
        finally:
            link.close()
            await shell._server.close()
        return got

    (failure,) = asyncio.run(main())
    assert isinstance(failure, AttemptFailed)
    assert failure.code == "protocol_error"


def test_a_message_without_a_ping_begins_a_lease_that_ends(redis_server: RedisServer) -> None:
    """A link that was cut delivers late: the lease of its sender is over by then, and nobody will end what it asks."""

    async def events() -> list[Any]:
        shell = NodeServer(DecodeConfig(node_id="decode-x", redis_url=redis_server.url, lease_s=0.3))
        await shell.bind()
        got: list[Any] = []
        shell._engine = SimpleNamespace(post=got.append)  # type: ignore[assignment]
        link = Link(shell.me.control_address, print, print)
        housekeeping = asyncio.create_task(shell._housekeeping())
        try:
            link.send(Abort(AttemptKey("late", 1)))
            async with asyncio.timeout(20):
                while len(got) < 2:
                    await asyncio.sleep(0.01)
        finally:
            housekeeping.cancel()
            link.close()
            await shell._server.close()
        return got

    asked, lost = asyncio.run(events())
    assert isinstance(asked, FromClient)
    assert lost == ClientLost(asked.identity)


@pytest.mark.parametrize("ends", [True, False], ids=["ended in order", "silent"])
def test_only_a_holder_that_stays_connected_is_called_silent(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    async def main() -> None:
        shell = NodeServer(DecodeConfig(node_id="decode-x", redis_url=redis_server.url, lease_s=0.3))
        await shell.bind()
        ponged = asyncio.Event()
        link = Link(shell.me.control_address, lambda _: ponged.set(), print)
        housekeeping = asyncio.create_task(shell._housekeeping())
        try:
            async with asyncio.timeout(20):
                link.send(Ping("prefill-0", 0.3))
                await ponged.wait()
                if ends:
                    link.close()
                while shell.leases:
                    await asyncio.sleep(0.01)
        finally:
            housekeeping.cancel()
            link.close()
            await shell._server.close()

    with caplog.at_level("INFO", "common.node.server"):
        asyncio.run(main())
    (record,) = caplog.records
    told = ("INFO", "closed its connection") if ends else ("WARNING", "silent past its lease")
    assert record.levelname == told[0]
    assert "prefill-0" in record.message
    assert told[1] in record.message


def test_few_tokens_are_sent_without_the_loop_and_never_before_what_it_has_still_to_send(
    redis_server: RedisServer,
) -> None:
    key, sent = AttemptKey("a", 1), list[str]()

    async def main() -> None:
        shell = NodeServer(DecodeConfig(node_id="decode-x", redis_url=redis_server.url))
        await shell.bind()

        def send_directly(identity: bytes, message: Message) -> bool:
            sent.append(f"{len(message.chunks)} directly" if isinstance(message, TokenBatch) else "?")
            return True

        shell._server.send_directly = send_directly  # type: ignore[method-assign]
        shell._server.send = lambda identity, message: sent.append(type(message).__name__)  # type: ignore[method-assign]
        tokens = [TokenChunk(key, start, [1]) for start in range(9)]

        def work() -> None:
            for chunks in (tokens[:1], tokens[:8], tokens):
                for chunk in chunks:
                    shell.send_buffer.tokens(b"1", chunk)
                shell.send_buffer.flush()
            shell.send_buffer.tokens(b"1", tokens[0])
            shell.send_buffer.flush()

        work()
        assert sent == ["1 directly", "8 directly"]
        await asyncio.sleep(0.01)
        shell.send_buffer.reply(b"1", AttemptFailed(key, "code", "message"))
        shell.send_buffer.flush()
        await asyncio.sleep(0.01)
        shell.send_buffer.tokens(b"1", tokens[0])
        shell.send_buffer.flush()
        assert sent[2:] == ["TokenBatch", "TokenBatch", "AttemptFailed", "1 directly"]
        await shell._server.close()

    asyncio.run(main())
