"""Protocol versions: what each one consists of, what an older end is not sent, and how two ends agree."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin
from urllib.parse import urlsplit

import msgpack
import pytest
from pydantic.fields import FieldInfo

from common.base.errors import ProtocolError
from common.base.message_types import Since
from common.cluster.records import LoadedAdapters, SignedRecord
from common.control import links
from common.control.codec import Codec, encode, join, split
from common.control.frames import with_length
from common.control.handshake import GREETING, versions_frame, versions_in
from common.control.identities import pack_ids
from common.control.links import Link, Server
from common.control.messages import AttemptKey, Grant, Message, NodeLoad, PeerRef, Ping, Pong
from common.control.versions import OLDEST_VERSION, OURS, PROTOCOL_VERSION, Versions, as_of, fields_of, since_of
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from kvtransfer.transports.collective.protocol import GroupLeave, GroupMeet, GroupReply, GroupRequest
from kvtransfer.wire import SliceAck, SliceHeader

SCHEMAS = {
    16: "9e91d97938920dc3",
    17: "ce29edf1f3fa2caf",
}
"""A digest of all messages and records of each protocol version. A version that has been released never changes. A change of
the newest one, which has not: a new field has a default and `Since(PROTOCOL_VERSION)`; put its digest here."""

WIRE_TYPES = (
    *get_args(Message),
    *(SignedRecord, LoadedAdapters, SliceHeader, SliceAck, GroupRequest, GroupMeet, GroupLeave, GroupReply),
)


def schema_of(version: int) -> list[str]:
    """One line for each field of each type that `version` sends. Fields of named tuples have a position."""
    lines: dict[str, None] = {}

    def add(cls: type[Any]) -> None:
        for position, (name, hint) in enumerate(fields_of(cls).items()):
            since = since_of(hint)
            if since is None or since.version <= version:
                place = f"{position} " if issubclass(cls, tuple) else ""
                lines[f"{cls.__name__}.{place}{name}: {text_of(hint)} = {default_of(cls, name)}"] = None

    def text_of(hint: Any) -> str:
        if isinstance(hint, type) and fields_of(hint):
            add(hint)
        if isinstance(hint, FieldInfo):
            return " and ".join(map(repr, hint.metadata))
        inner = ", ".join(text_of(part) for part in get_args(hint) if not isinstance(part, Since))
        if get_origin(hint) in (Union, UnionType):
            return f"one of {inner}"
        return f"{hint.__name__}[{inner}]" if inner else getattr(hint, "__name__", repr(hint))

    for cls in WIRE_TYPES:
        lines[f"message {cls.__name__}"] = None
        add(cls)
    return sorted(lines)


def default_of(cls: type[Any], name: str) -> str:
    if issubclass(cls, tuple):
        return repr(getattr(cls, "_field_defaults").get(name, "required"))  # noqa: B009 - unknown to pyright
    [found] = [each for each in fields(cls) if each.name == name]
    if found.default_factory is not MISSING:
        return repr(found.default_factory())
    return "required" if found.default is MISSING else repr(found.default)


@pytest.mark.parametrize("version", range(OLDEST_VERSION, PROTOCOL_VERSION + 1))
def test_nobody_changes_a_protocol_version_silently(version: int) -> None:
    schema = schema_of(version)
    assert hashlib.sha256("\n".join(schema).encode()).hexdigest()[:16] == SCHEMAS[version], "\n".join(schema)


def test_the_oldest_version_spoken_is_the_one_before() -> None:
    assert PROTOCOL_VERSION - 1 == OLDEST_VERSION == OURS.oldest
    assert OURS.newest == PROTOCOL_VERSION


# ---------------------------------------------------------------- fields


class Inner(NamedTuple):
    number: int
    later: Annotated[str, Since(17)] = ""


@dataclass(frozen=True)
class Outer:
    items: list[Inner]
    by_name: dict[str, Inner] = field(default_factory=dict[str, Inner])
    vital: Annotated[list[int], Since(17, needed=True)] = field(default_factory=list[int])


PAIR = Codec(Inner, Outer)
LOAD = NodeLoad(running=1)
GRANT = Grant(
    AttemptKey("r", 1),
    PeerRef("n", "i", "tcp://127.0.0.1:1", []),
    KVLayout("f", KVSpec.uniform(1, 1, 8, "float32"), tp_size=1, pp_layers=(1,)),
    [0],
    [pack_ids([1])],
    PROTOCOL_VERSION,
)


def test_an_older_end_is_not_sent_newer_fields_at_any_depth_and_reads_the_rest() -> None:
    message = Outer([Inner(1, "a"), Inner(2)], {"x": Inner(3, "b")})
    assert msgpack.unpackb(PAIR.encode(message, 16)) == [16, "Outer", {"items": [[1], [2]], "by_name": {"x": [3]}}]
    assert PAIR.decode(PAIR.encode(message, 16)) == Outer([Inner(1), Inner(2)], {"x": Inner(3)})
    assert PAIR.decode(PAIR.encode(message)) == message


def test_a_message_that_an_older_end_would_misunderstand_is_not_sent_to_it() -> None:
    message = Outer([], vital=[7])
    with pytest.raises(ProtocolError, match=r"Outer\.vital needs protocol version 17; the other end speaks 16"):
        PAIR.encode(message, 16)
    assert PAIR.decode(PAIR.encode(message)) == message


def test_messages_without_newer_fields_are_not_copied() -> None:
    ping = Ping("r", 1.0)
    assert as_of(ping, 16) is ping


# ---------------------------------------------------------------- links


def test_two_ends_of_this_version_use_it() -> None:
    async def main() -> None:
        received: list[Message] = []
        server = Server("127.0.0.1", 0, lambda identity, message: server.send(identity, Pong("n", "i", LOAD)))
        link = Link(server.address, received.append, lambda reason: None)
        link.send(Ping("r", 1.0))
        await until(lambda: received)
        assert link.version == PROTOCOL_VERSION
        assert [each.version for each in server._connections.values()] == [PROTOCOL_VERSION]
        link.close()
        await server.close()

    run(main())


def test_a_link_of_16_gets_a_greeting_that_it_reads_and_answers_in_16() -> None:
    """It reads the greeting by `split`, and refuses every version but its own."""

    async def main() -> None:
        server = Server("127.0.0.1", 0, lambda identity, message: server.send(identity, Pong("n", "i", LOAD)))
        reader, writer = await connect(server.address)
        assert split(await frame_of(reader)) == []
        writer.write(with_length(join([encode(Ping("r", 1.0), 16)])))
        [envelope] = split(await frame_of(reader))
        assert isinstance(envelope, list)
        assert envelope[:2] == [16, "Pong"]
        writer.close()
        await server.close()

    run(main())


def test_a_link_speaks_16_to_a_server_of_16_also_in_what_was_sent_before_it_was_connected() -> None:
    async def main() -> None:
        async with fake_server(b"\x90") as (address, frames):
            link = Link(address, lambda message: None, lambda reason: None)
            link.send(GRANT)
            await until(lambda: frames)
            [[version, name, body]] = frames[0]
            assert (version, name, "protocol" in body) == (16, "Grant", False)
            link.send(GRANT)
            await until(lambda: len(frames) == 2)
            assert frames[1][0][0] == 16
            link.close()

    run(main())


@pytest.mark.parametrize(
    ("greeting", "theirs", "said"),
    [
        pytest.param(b"\x90", "16", Versions(17, 18), id="its server is of 16, this is 18"),
        pytest.param(GREETING, "19 to 20", OURS, id="its server is of 20, this is 17"),
    ],
)
def test_a_link_to_a_server_two_versions_apart_is_lost_with_one_sentence(
    greeting: bytes, theirs: str, said: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "OURS", said)

    async def main() -> None:
        lost: list[str] = []
        async with fake_server(greeting, Versions(19, 20)) as (address, _):
            link = Link(address, lambda message: None, lost.append)
            await until(lambda: lost)
            assert link.closed
        sentence = f"no protocol version in common: theirs is {theirs}, ours is {said}"
        assert lost == [f"{address} does not speak our protocol: {sentence}"]

    run(main())


def test_a_server_closes_a_link_two_versions_apart_with_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        received: list[Message] = []
        server = Server("127.0.0.1", 0, lambda identity, message: received.append(message))
        reader, writer = await connect(server.address)
        await frame_of(reader)
        writer.write(with_length(join([packed([0, "Versions", [19, 20, "and more"]]), packed([20, "Ping", {}])])))
        [envelope] = split(await frame_of(reader))
        assert versions_in(envelope) == OURS
        assert await reader.read() == b""
        assert not received
        writer.close()
        await server.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    [line] = [each.getMessage() for each in caplog.records if "protocol version" in each.getMessage()]
    assert line == f"closed a control connection: no protocol version in common: theirs is 19 to 20, ours is {OURS}"


def test_versions_may_be_said_only_once() -> None:
    """Each is answered, and somebody who never reads the answers would fill the queue."""

    async def main() -> None:
        server = Server("127.0.0.1", 0, lambda identity, message: None)
        reader, writer = await connect(server.address)
        await frame_of(reader)
        for _ in range(12):
            writer.write(with_length(versions_frame()))
        await frame_of(reader)
        assert await reader.read() == b""
        writer.close()
        await server.close()

    run(main())


@pytest.mark.parametrize("envelope", [[0, "Versions", [2, 1]], [0, "Versions", []], [0, "Other", [16, 17]], [0]])
def test_malformed_versions_are_refused(envelope: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        versions_in(envelope)


# ---------------------------------------------------------------- helpers


def packed(value: object) -> bytes:
    data = msgpack.packb(value)
    assert data is not None
    return data


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(address)
    return await asyncio.open_connection(place.hostname, place.port)


async def frame_of(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


@asynccontextmanager
async def fake_server(greeting: bytes, spoken: Versions = OURS) -> AsyncIterator[tuple[str, list[list[Any]]]]:
    """Returns the server's address, and the frames that it has received. If it greets as we do, it answers the first frame with
    the versions that it speaks, `spoken`."""
    frames: list[list[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(with_length(greeting))
        if greeting == GREETING:
            await frame_of(reader)
            writer.write(with_length(join([packed([0, "Versions", spoken])])))
        try:
            while True:
                frames.append(msgpack.unpackb(await frame_of(reader)))
        except asyncio.IncompleteReadError:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"tcp://{host}:{port}", frames
