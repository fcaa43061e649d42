"""The targets of a running cluster: each sends one mutated message per call, made from the random numbers it is given."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ipaddress
import json
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgpack
import redis.asyncio
import zmq
import zmq.asyncio

from common.control.codec import decode, encode
from common.control.frames import with_length
from common.control.messages import NodeRecord
from common.control.versions import PROTOCOL_VERSION
from common.security.names import host_of
from common.security.tls import Credentials
from fuzz import mutate
from fuzz.traffic import HOSTS, HTTP_CALLS, control_messages, data_header
from kvtransfer.transports.choose import parse_offers
from kvtransfer.transports.shm import ring

_WAIT_S = 2.0
"""An answer that takes longer is not waited for: `Watch` looks at what its process does meanwhile."""


class Target(Protocol):
    """Where messages come in."""

    name: str

    async def send_case(self, rng: random.Random) -> None:
        """Send one case. Raises: nothing for whatever the other end does with it."""
        ...


@dataclass
class Place:
    """What the targets need to know about the cluster."""

    url: str
    redis_url: str
    nodes: list[NodeRecord]
    credentials: Credentials | None = None
    """With which control links are opened, where nodes want certificates."""


async def _talk(host: str, port: int, data: bytes, *, waits: bool, credentials: Credentials | None = None) -> None:
    """Send bytes over a connection of their own and read what comes back for a moment."""
    secured: dict[str, Any] = {}
    if credentials is not None:
        secured = {"ssl": credentials.for_client(), "server_hostname": host_of("node")}
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_WAIT_S):
            reader, writer = await asyncio.open_connection(host, port, **secured)
            try:
                writer.write(data)
                await writer.drain()
                if waits:
                    await reader.read(65536)
            finally:
                writer.transport.abort()


class HttpTarget:
    name = "http"

    def __init__(self, place: Place) -> None:
        parts = urlsplit(place.url)
        self._host, self._port = parts.hostname or "", parts.port or 0

    async def send_case(self, rng: random.Random) -> None:
        method, path, body = rng.choice(HTTP_CALLS)
        if body is not None and rng.random() < 0.7:
            text = json.dumps(mutate.structure(rng, body)).encode("utf-8", "surrogatepass")
        else:
            text = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text
        if rng.random() < 0.4:
            request = mutate.raw(rng, request)
        await _talk(self._host, self._port, request, waits=rng.random() < 0.8)


class HostTarget:
    """Mutated `Host` headers. Raises: ValueError if one is answered that names neither an address nor this host."""

    name = "hosts"

    def __init__(self, place: Place) -> None:
        parts = urlsplit(place.url)
        self._host, self._port = parts.hostname or "", parts.port or 0

    async def send_case(self, rng: random.Random) -> None:
        value = rng.choice(HOSTS).encode()
        if rng.random() < 0.7:
            value = mutate.raw(rng, value)
        path = rng.choice(["/v1/models", "/ui/api/nodes", "/metrics"])
        head = f"GET {path} HTTP/1.1\r\nConnection: close\r\nHost: ".encode() + value + b"\r\n\r\n"
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(head)
                    status = (await reader.readline()).split(b" ")[1:2]
                finally:
                    writer.transport.abort()
                if status == [b"200"] and not _is_own(value):
                    raise ValueError(f"Host {value!r} was answered")


def _is_own(value: bytes) -> bool:
    """Whether a header's value is an address or a name of this host, with a port or without; or has line breaks, and so more headers."""
    if b"\n" in value or b"\r" in value:
        return True
    text = value.decode("latin-1").strip(" \t")
    name = text if text.endswith("]") else text.rpartition(":")[0] if ":" in text else text
    name = name.removeprefix("[").removesuffix("]").rstrip(".").lower()
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name in ("", "localhost", socket.gethostname().lower())


class ControlTarget:
    name = "control"

    def __init__(self, place: Place) -> None:
        self._nodes, self._credentials = place.nodes, place.credentials

    async def send_case(self, rng: random.Random) -> None:
        node = rng.choice(self._nodes)
        messages = [rng.choice(control_messages(node, self._nodes)) for _ in range(rng.choice([1, 1, 3]))]
        envelopes = [msgpack.unpackb(encode(message)) for message in messages]
        if rng.random() < 0.75:
            envelopes = mutate.structure(rng, envelopes)
        data = with_length(_packed(envelopes))
        if rng.random() < 0.3:
            data = mutate.raw(rng, data)
        parts = urlsplit(node.peer.control_address)
        waits = rng.random() < 0.3
        await _talk(parts.hostname or "", parts.port or 0, data, waits=waits, credentials=self._credentials)


class DataTarget:
    name = "data"

    def __init__(self, place: Place) -> None:
        self._nodes = [node for node in place.nodes if node.peer.data_addresses]
        self._context = zmq.asyncio.Context()

    async def send_case(self, rng: random.Random) -> None:
        node = rng.choice(self._nodes)
        offers = {offer.transport: offer for offer in parse_offers(rng.choice(node.peer.data_addresses))}
        header = msgpack.unpackb(data_header(rng, node))
        frames = [_packed(mutate.structure(rng, header)), rng.randbytes(rng.choice([0, 1, 64, 4096]))]
        if rng.random() < 0.3:
            frames = [mutate.raw(rng, frame) for frame in frames]
        if rng.random() < 0.1:
            frames = frames * rng.choice([0, 2, 30]) or [b""]
        client = self._context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 200)
        client.connect(offers["zmq"].endpoint)
        with contextlib.suppress(TimeoutError):  # with certificates, a listener takes nothing from strangers
            await asyncio.wait_for(client.send_multipart(frames), _WAIT_S)
        if rng.random() < 0.3:
            await client.poll(50)
        client.close()


class SharedMemoryTarget:
    name = "shm"

    def __init__(self, place: Place) -> None:
        self._nodes = [node for node in place.nodes if node.peer.data_addresses]

    async def send_case(self, rng: random.Random) -> None:
        node = rng.choice(self._nodes)
        offers = {offer.transport: offer for offer in parse_offers(rng.choice(node.peer.data_addresses))}
        if "shm" not in offers:
            return
        name = "\0" + offers["shm"].endpoint.rpartition("/")[2]
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(0.2)
            client.connect(name)
            await asyncio.to_thread(self._greet, rng, client)

    def _greet(self, rng: random.Random, client: socket.socket) -> None:
        shared, memory, greeting = ring.create(4, 4096)
        files = [memory]
        with contextlib.suppress(OSError):
            match rng.randrange(5):
                case 0:
                    greeting = mutate.raw(rng, greeting)
                case 1:
                    files = rng.choice(
                        [[], [memory, memory], [os.memfd_create("other")], [os.open("/dev/null", os.O_RDWR)]]
                    )
                case 2:
                    files = [os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)]
                    os.ftruncate(files[0], rng.choice([0, 4096, 2**30]))
                case _:
                    pass
            fds = array.array("i", files)
            client.sendmsg([greeting], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if files else [])
            for _ in range(rng.choice([1, 3])):
                page, header_bytes, payload_bytes = (
                    rng.randrange(6),
                    rng.choice([0, 8, 2**21, 2**32 - 1]),
                    rng.choice([0, 64, 4096, 2**40]),
                )
                with contextlib.suppress(ValueError):
                    shared.header(0, 8)[:] = 0x93
                message = ring.PAGE_MESSAGE.pack(page, header_bytes, payload_bytes)
                client.send(mutate.raw(rng, message) if rng.random() < 0.4 else message)
        for file in {memory, *files}:
            with contextlib.suppress(OSError):
                os.close(file)


class RedisTarget:
    """Changes what the cluster keeps in Redis; the services write it anew."""

    name = "redis"

    def __init__(self, place: Place) -> None:
        self._client: Any = redis.asyncio.Redis.from_url(place.redis_url)

    async def send_case(self, rng: random.Random) -> None:
        with contextlib.suppress(redis.RedisError):
            keys: list[bytes] = sorted(await self._client.keys("kvrelay:*"))
            if not keys:
                return
            key = rng.choice(keys)
            choices: list[Callable[[], Any]] = [
                lambda: self._change_record(rng, key),
                lambda: self._change_record(rng, key),
                lambda: self._client.delete(key),
                lambda: self._evict(rng, keys),
                lambda: self._replace(rng, key),
                lambda: self._invent(rng, key),
            ]
            await rng.choice(choices)()

    async def _evict(self, rng: random.Random, keys: list[bytes]) -> None:
        """Delete many keys at once, as a Redis does that has no memory left."""
        await self._client.delete(*rng.sample(keys, rng.randint(1, len(keys))))

    async def _change_record(self, rng: random.Random, key: bytes) -> None:
        if b":node:" not in key:
            return
        data = await self._client.get(key)
        if data:
            try:
                envelope = msgpack.unpackb(data)
            except ValueError:  # changed before
                return
            changed = _packed(mutate.structure(rng, envelope)) if rng.random() < 0.7 else mutate.raw(rng, data)
            await self._client.set(key, changed, keepttl=True)

    async def _replace(self, rng: random.Random, key: bytes) -> None:
        await self._client.delete(key)
        match rng.randrange(4):
            case 0:
                await self._client.set(key, rng.choice(mutate.TEXTS).encode("utf-8", "surrogatepass"))
            case 1:
                await self._client.hset(key, mapping={"incarnation": "x", "started_at": rng.choice(["1", "nan", "-"])})
            case 2:
                await self._client.sadd(key, rng.randbytes(rng.choice([1, 16, 17])))
            case _:
                await self._client.xadd(
                    key, {"kind": rng.choice(["change", "reset", "?"]), "stored": rng.randbytes(20)}
                )

    async def _invent(self, rng: random.Random, key: bytes) -> None:
        """A node that does not exist, in the index of nodes."""
        cluster = key.partition(b"}")[0] + b"}:"
        name = f"ghost-{rng.randrange(3)}".encode()
        await self._client.zadd(cluster + b"nodes", {name: rng.choice([0, 1e9, 4e9])})
        for other in await self._client.keys(cluster.replace(b"{", b"[{]").replace(b"}", b"[}]") + b"node:*"):
            data = await self._client.get(other)
            if data:
                with contextlib.suppress(Exception):
                    record = decode(data)
                    assert isinstance(record, NodeRecord)
                    envelope = msgpack.unpackb(data)
                    envelope[2]["peer"]["node_id"], envelope[2]["peer"]["incarnation"] = (
                        name.decode(),
                        rng.randbytes(8).hex(),
                    )
                    await self._client.set(cluster + b"node:" + name, _packed(envelope), px=1500)
                return


def _packed(tree: Any) -> bytes:
    """As MessagePack; what it cannot hold becomes a null."""
    try:
        return msgpack.packb(tree, default=lambda _: None)
    except (OverflowError, ValueError, UnicodeError):
        return msgpack.packb([PROTOCOL_VERSION, "Ping", None])
