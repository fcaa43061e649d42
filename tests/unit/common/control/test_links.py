"""Control links: order, framing, full queues, foreign peers, reconnecting."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
import uvloop

from common.base.clock import monotonic
from common.base.errors import ConfigError, ProtocolError, Unavailable
from common.control import connection_limits, frames, links
from common.control.codec import MAX_MESSAGE_BYTES, MAX_MESSAGES, encode, join
from common.control.handshake import GREETING
from common.control.links import Link, Server
from common.control.messages import Abort, AttemptFailed, AttemptKey, Message

GREETED = frames.with_length(GREETING)


def abort(number: int) -> Abort:
    return Abort(AttemptKey(str(number), 1))


def test_messages_of_one_turn_arrive_in_order_and_malformed_ones_are_dropped() -> None:
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
        assert link._connection is not None
        for frame in (join([encode(abort(50)), junk]), junk, b"\xc1", join([encode(abort(51))])):
            link._connection.send(frame)
        await until(lambda: len(received) == 52)
        assert received[50:] == [abort(50), abort(51)]
        assert not lost
        link.close()
        with pytest.raises(Unavailable):
            link.send(abort(52))
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_unsent_messages_of_a_full_queue_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "QUEUE_BYTES", len(encode(abort(1))))

    async def main() -> None:
        lost: list[str] = []
        link = Link("tcp://127.0.0.1:9", lambda _: None, lost.append)  # nobody listens there
        link.send(abort(1))
        await asyncio.sleep(0)
        assert not lost
        link.send(abort(2))
        link.send(abort(3))
        await until(lambda: lost)
        assert link.refused == [abort(1), abort(2), abort(3)]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("turns", range(4))
def test_a_process_that_stands_still_while_it_connects_has_a_link_or_knows_that_it_has_none(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """A link that was made after its time must not look like one that stands: nobody would ever open another."""
    monkeypatch.setattr(links, "_CONNECT_TIMEOUT_S", 0.05)

    async def main() -> None:
        received: list[Message] = []
        lost: list[str] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        link = Link(server.address, lambda _: None, lost.append)
        link.send(abort(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.1)
        await until(lambda: received or lost)
        link.close()
        await server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


def test_frames_split_at_any_size_arrive_whole_and_other_work_gets_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TCP does not preserve frames; and a thousand frames at once must not block the loop."""

    async def main() -> None:
        received: list[Message] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        sent: list[Message] = [abort(number) for number in range(1000)]
        sent[500] = AttemptFailed(AttemptKey("500", 1), "code", "x" * 300_000)
        stream = b"".join(frames.with_length(join([encode(message)])) for message in sent)
        place = urlsplit(server.address)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        assert await reader.readexactly(len(GREETED)) == GREETED
        for byte in range(10):
            writer.write(stream[byte : byte + 1])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(stream[10:])
        most = before = 0
        while len(received) < 1000:
            await asyncio.sleep(0)
            most, before = max(most, len(received) - before), len(received)
        assert received == sent
        assert most <= 2 * frames._FRAMES_PER_TURN
        writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_messages_before_the_end_of_a_connection_are_handled() -> None:
    async def main() -> None:
        received, lost = list[Message](), list[str]()
        server = Server("127.0.0.1", 0, lambda _, message: None)
        identity: list[bytes] = []
        server._on_message = lambda who, _: identity.append(who)
        link = Link(server.address, received.append, lost.append)
        link.send(abort(0))
        await until(lambda: identity)
        for number in range(500):
            server.send(identity[0], abort(number))
        await server.close()
        await until(lambda: lost)
        assert received == [abort(number) for number in range(500)]
        assert lost == [f"connection to {server.address} broke"]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_peer_with_another_protocol_is_disconnected_without_effect_on_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        received, lost = list[Message](), list[str]()
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        link = Link(server.address, lambda _: None, lost.append)
        place = urlsplit(server.address)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == GREETED
        writer.close()
        link.send(abort(1))
        await until(lambda: received)
        assert not lost
        link.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert "does not speak our protocol: a frame of 1195725856 bytes" in caplog.text


@pytest.mark.parametrize("host", ["é..b", "192.0.2.1", "no such host"])
def test_a_host_that_is_not_local_is_reported_in_one_sentence(host: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=f"cannot listen on {host}:0: "):
            Server(host, 0, lambda *_: None)

    asyncio.run(main())


def test_a_link_to_something_else_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(greeting: bytes) -> str:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(greeting)

        lost: list[str] = []
        listening = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        link = Link(f"tcp://127.0.0.1:{port}", lambda _: None, lost.append)
        link.send(abort(1))
        await until(lambda: lost)
        assert link.closed
        listening.close()
        return lost[0]

    monkeypatch.setattr(links, "_GREETING_S", 0.1)
    assert "does not speak our protocol" in asyncio.run(main(b"SSH-2.0-OpenSSH_9.2\r\n"))
    assert "does not speak our protocol" in asyncio.run(main(b"\xff\0\0\0\0\0\0\0\1\x7f\3"))  # ZMQ, as we did before
    assert "sent nothing" in asyncio.run(main(b""))


def test_a_link_that_reached_itself_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP may connect a socket to itself if nobody listens on the ephemeral port that it got."""

    async def main() -> None:
        with socket.socket() as itself:
            itself.bind(("127.0.0.1", 0))
            itself.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(itself, itself.getsockname())
            create, lost = loop.create_connection, list[str]()
            monkeypatch.setattr(loop, "create_connection", lambda factory, *_, **__: create(factory, sock=itself))
            Link("tcp://127.0.0.1:9", lambda _: None, lost.append)
            await until(lambda: lost)
            assert "reached itself" in lost[0]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_client_that_does_not_read_loses_its_link_and_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages to it were dropped: while the link stays, a router waits for them until its requests' deadlines."""
    monkeypatch.setattr(frames, "QUEUE_BYTES", 1)

    async def main() -> None:
        asked: list[bytes] = []
        received: list[Message] = []
        lost: list[str] = []
        server = Server("127.0.0.1", 0, lambda identity, _: asked.append(identity))
        link = Link(server.address, received.append, lost.append)
        link.send(abort(1))
        await until(lambda: asked)
        large = AttemptFailed(AttemptKey("a", 1), "code", "x" * (MAX_MESSAGE_BYTES // 2))
        assert link._connection is not None
        assert link._connection._transport is not None
        link._connection._transport.pause_reading()

        def fill() -> None:
            for _ in range(20):  # the kernel's buffers take the first ones
                server.send(asked[0], large)

        with pytest.raises(Unavailable):
            fill()
        link._connection._transport.resume_reading()
        await until(lambda: lost)
        with pytest.raises(Unavailable):
            server.send(asked[0], abort(2))
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_another_thread_sends_in_order_with_the_loop_until_the_client_reads_slowly(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        asked, received, lost, refused = list[bytes](), list[Message](), list[str](), list[int]()
        server = Server("127.0.0.1", 0, lambda identity, _: asked.append(identity))
        link = Link(server.address, received.append, lost.append)
        link.send(abort(0))
        await until(lambda: asked)

        def send_some() -> None:
            for number in range(1, 100):
                assert server.send_directly(asked[0], abort(number))

        await asyncio.to_thread(send_some)
        server.send(asked[0], abort(100))
        assert link._connection is not None
        assert link._connection._transport is not None
        link._connection._transport.pause_reading()

        def fill() -> None:
            for number in range(101, 121):  # the kernel's buffers take the first ones
                message = AttemptFailed(AttemptKey(str(number), 1), "code", "x" * 1_000_000)
                if not server.send_directly(asked[0], message):
                    refused.append(number)

        await asyncio.to_thread(fill)
        assert refused
        server.send(asked[0], abort(121))
        link._connection._transport.resume_reading()
        sent = [number for number in range(1, 122) if number not in refused]
        await until(lambda: len(received) == len(sent))
        assert [int(each.key.request_id) for each in received if isinstance(each, Abort | AttemptFailed)] == sent
        await until(lambda: server.send_directly(asked[0], abort(0)))
        assert not lost
        link.close()
        await until(lambda: not server.send_directly(asked[0], abort(0)))
        await server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


def test_what_a_slow_client_has_not_read_still_arrives_after_the_end() -> None:
    async def main() -> None:
        asked, received = list[bytes](), list[Message]()
        server = Server("127.0.0.1", 0, lambda identity, _: asked.append(identity))
        link = Link(server.address, received.append, lambda _: None)
        link.send(abort(0))
        await until(lambda: asked)
        assert link._connection is not None
        assert link._connection._transport is not None
        link._connection._transport.pause_reading()
        for number in range(20):
            server.send(asked[0], AttemptFailed(AttemptKey(str(number), 1), "code", "x" * 1_000_000))
        await server.close()
        link._connection._transport.resume_reading()
        await until(lambda: len(received) == 20)
        link.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_message_that_nobody_would_read_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="AttemptFailed cannot be sent"):
        encode(AttemptFailed(AttemptKey("a", 1), "code", "x" * MAX_MESSAGE_BYTES))


def test_large_messages_of_one_turn_are_not_joined_into_a_frame_that_is_too_large() -> None:
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


def test_connecting_is_retried_every_two_seconds_however_long_the_other_end_was_unreachable() -> None:
    """TCP retries less and less often: after 7 s not before 11 s. Here the other end drops packets for 8 s."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as fillers:
            listener.setblocking(False)
            for _ in range(2):  # more than its queue holds
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            await asyncio.sleep(0.2)
            link = Link(f"tcp://127.0.0.1:{listener.getsockname()[1]}", lambda _: None, lambda _: None)
            link.send(abort(0))
            await asyncio.sleep(8)
            loop, away_until_s = asyncio.get_running_loop(), monotonic()
            while True:
                connection, _ = await loop.sock_accept(listener)
                fillers.enter_context(connection)
                connection.setblocking(False)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    await loop.sock_sendall(connection, b"\0\0\0\1\x90")
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


def test_malformed_messages_cost_one_line_for_a_frame_and_then_their_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A frame of 100,000 of them once held the loop for a second, with a line in the log for each."""

    async def main() -> None:
        received: list[Message] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        place = urlsplit(server.address)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        for number in range(links._MAX_MALFORMED):
            writer.write(frames.with_length(join([encode(abort(number)), *[b"\xc0"] * 1000])))
        assert await reader.read() == GREETED
        assert received == [abort(number) for number in range(links._MAX_MALFORMED)]
        writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert len(caplog.records) == links._MAX_MALFORMED


def test_many_small_messages_leave_turns_to_other_work() -> None:
    async def main() -> None:
        received: list[Message] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        link = Link(server.address, lambda _: None, lambda _: None)
        for number in range(20_000):
            link.send(abort(number))
        most = before = 0
        while len(received) < 20_000:
            await asyncio.sleep(0)
            most, before = max(most, len(received) - before), len(received)
        assert received == [abort(number) for number in range(20_000)]
        assert most <= 4 * MAX_MESSAGES
        link.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 30))


async def hears_an_end(reader: asyncio.StreamReader) -> bytes:
    """What a server sends until it closes."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 10)
    return b""


async def connected(server: Server, count: int = 1) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    place = urlsplit(server.address)
    return [await asyncio.open_connection(place.hostname, place.port) for _ in range(count)]


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\x09half", b"\0\0\0\x01\x90\0\0\0\x09half"])
def test_who_sends_no_whole_frame_is_let_go_and_others_are_not(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection_limits, "_WAIT_S", 0.05)
    monkeypatch.setattr(connection_limits, "_CHECK_S", 0.01)

    async def main() -> None:
        received: list[Message] = []
        server = Server("127.0.0.1", 0, lambda _, message: received.append(message))
        link = Link(server.address, lambda _: None, lambda why: pytest.fail(why))
        link.send(abort(1))
        [(reader, writer)] = await connected(server)
        writer.write(sent)
        assert await hears_an_end(reader) == GREETED
        await asyncio.sleep(0.1)
        link.send(abort(2))
        await until(lambda: len(received) == 2)
        link.close()
        writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_connections_are_bounded_and_have_room_again_when_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 3)

    async def main() -> None:
        server = Server("127.0.0.1", 0, lambda *_: None)
        open_ones = await connected(server, 3)
        for reader, _ in open_ones:
            assert await reader.readexactly(len(GREETED)) == GREETED
        for reader, writer in await connected(server, 2):
            assert await hears_an_end(reader) == b""
            writer.close()
        open_ones[0][1].close()
        await until(lambda: len(server._connections) == 2)
        [(reader, writer)] = await connected(server)
        assert await reader.readexactly(len(GREETED)) == GREETED
        for each in (writer, *(writer for _, writer in open_ones)):
            each.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_unfinished_frames_of_all_connections_are_bounded_and_the_largest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_UNFINISHED_BYTES", 3_000_000)

    async def main() -> None:
        server = Server("127.0.0.1", 0, lambda *_: None)
        made = await connected(server, 4)
        head = (8_000_000).to_bytes(4, "big")
        for (_, writer), size in zip(made, (700_000, 1_200_000, 700_000, 700_000), strict=True):
            writer.write(head + bytes(size))
            await writer.drain()
        assert await hears_an_end(made[1][0]) in (GREETED, b"")
        assert len(server._connections) == 3
        for _, writer in made:
            writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))
