"""Control links: what one turn of the loop sends, in order, whatever is among it."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket

import pytest

from common import rpc
from common.clock import monotonic
from common.errors import Unavailable
from common.protocol import MAX_MESSAGE_BYTES, Abort, AttemptFailed, AttemptKey, Message, encode, join
from common.rpc import Link, Server


def abort(number: int) -> Abort:
    return Abort(AttemptKey(str(number), 1))


def test_what_one_turn_sends_arrives_in_order_and_junk_among_it_is_dropped() -> None:
    async def main() -> None:
        received: list[Message] = []
        lost: list[str] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        link = Link(server.address, lambda _: None, lost.append)
        for number in range(50):
            link.send(abort(number))
        await until(lambda: len(received) == 50)
        assert received == [abort(number) for number in range(50)]
        junk = b"\xa4junk"  # a string where a message should be
        link._socket.send_multipart([join([encode(abort(50)), junk]), junk, b"\xc1", join([encode(abort(51))])])
        await until(lambda: len(received) == 52)
        assert received[50:] == [abort(50), abort(51)]
        assert not lost
        link.close()
        with pytest.raises(Unavailable):
            link.send(abort(52))
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_a_full_queue_refused_can_be_told_from_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_QUEUE_MESSAGES", 1)

    async def main() -> None:
        lost: list[str] = []
        link = Link("tcp://127.0.0.1:9", lambda _: None, lost.append)  # nobody listens there
        link.send(abort(1))
        await asyncio.sleep(0)
        assert not lost
        link.send(abort(2))
        link.send(abort(3))
        await until(lambda: lost)
        assert link.refused == [abort(2), abort(3)]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_arrives_while_a_send_fails_is_read() -> None:
    """A node's answer to a router that is gone must not hide what another one has just asked."""

    async def main() -> None:
        received: list[Message] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        link = Link(server.address, lambda _: None, lambda _: None)
        link.send(abort(0))
        await until(lambda: received)
        link.send(abort(1))
        link._flush()
        assert select.select([server._inbox._fd], [], [], 5)[0], "it has arrived, and the loop does not know yet"
        with pytest.raises(Unavailable):
            server.send(b"nobody", abort(2))
        await until(lambda: len(received) == 2)
        link.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 5))


def test_large_messages_of_one_turn_do_not_add_up_to_a_frame_that_is_refused() -> None:
    async def main() -> None:
        received: list[Message] = []
        lost: list[str] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        link = Link(server.address, lambda _: None, lost.append)
        large = [
            AttemptFailed(AttemptKey(str(number), 1), "code", "x" * (MAX_MESSAGE_BYTES // 3)) for number in range(4)
        ]
        for message in large:
            link.send(message)
        await until(lambda: len(received) == 4 or lost)
        assert received == large
        assert not lost
        link.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_connecting_is_tried_again_every_other_second_however_long_the_other_end_was_away() -> None:
    """TCP tries less and less often: after 7 seconds not before the 11th. Here the other end drops what comes for 8."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as fillers:
            listener.setblocking(False)
            for _ in range(2):  # more than its queue holds
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            await asyncio.sleep(0.2)
            link = Link(f"tcp://127.0.0.1:{listener.getsockname()[1]}", lambda _: None, lambda _: None)
            await asyncio.sleep(8)
            loop, away_until_s = asyncio.get_running_loop(), monotonic()
            while True:
                connection, _ = await loop.sock_accept(listener)
                fillers.enter_context(connection)
                connection.setblocking(False)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        if await loop.sock_recv(connection, 1):
                            break
            assert monotonic() - away_until_s < 2.5
            link.close()

    asyncio.run(asyncio.wait_for(main(), 20))


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)
