"""Talks to nodes directly, as a router does, to measure the nodes alone and the latency that a router adds.

Runs on the benchmark's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable

from common.base.errors import from_code
from common.cluster.membership import Directory
from common.control.identities import pack_ids
from common.control.links import Link, Server
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    Message,
    NodeLoad,
    NodeRecord,
    PeerRef,
    Ping,
    Pong,
    PrefillRequest,
    SamplingParams,
    TokenBatch,
    TokenChunk,
)

_LEASE_S = 3.0
_TIMEOUT_S = 300.0


async def find_nodes(redis_url: str, cluster: str = "default") -> dict[str, NodeRecord]:
    """One node of each role, from the membership. Raises: TimeoutError."""
    found: asyncio.Future[dict[str, NodeRecord]] = asyncio.get_running_loop().create_future()

    def on_change(records: list[NodeRecord]) -> None:
        by_role = {record.role: record for record in records}
        if set(by_role) == {"prefill", "decode"} and not found.done():
            found.set_result({str(role): record for role, record in by_role.items()})

    watching = asyncio.create_task(Directory(redis_url, cluster, on_change, 0.1).run())
    try:
        return await asyncio.wait_for(found, 30)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class DirectRouter:
    """Links to one prefill and one decode node, kept alive by pings; an async context manager."""

    def __init__(self, prefill: PeerRef, decode: PeerRef) -> None:
        self._peers = {"prefill": prefill, "decode": decode}
        self._links: dict[str, Link] = {}
        self._waiting: dict[AttemptKey, Callable[[float, TokenChunk | AttemptFailed], None]] = {}
        self._numbers = itertools.count()
        self._name = f"bench-{secrets.token_hex(4)}"
        self.loads: dict[str, NodeLoad] = {}
        """By role, as of the last pong."""

    async def __aenter__(self) -> DirectRouter:
        for role, peer in self._peers.items():
            self._links[role] = Link(
                peer.control_address, lambda message, role=role: self._on_message(role, message), self._on_lost
            )
        # Nothing here answers a prefill node's offers: such a prompt is computed and its KV is not relayed.
        self._nobody = Server("127.0.0.1", 0, lambda identity, message: None)
        self.unwilling = PeerRef("nobody", secrets.token_hex(8), self._nobody.address, ["tcp://127.0.0.1:1"])
        self._pinging = asyncio.create_task(self._ping())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pinging.cancel()
        await asyncio.gather(self._pinging, return_exceptions=True)
        for link in self._links.values():
            link.close()
        await self._nobody.close()

    async def first_token_s(self, prompt: list[int], max_tokens: int, *, relayed: bool) -> tuple[float, float]:
        """Seconds to the first and to the last token of a greedy request.

        With `relayed` its KV goes to the decode node, which generates the rest; without, no byte of it is sent and
        the request ends with its first token. Raises: KvRelayError, TimeoutError.
        """
        key = AttemptKey(f"{self._name}-{next(self._numbers)}", 1)
        sampling = SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0)
        times: list[float] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_chunk(at: float, chunk: TokenChunk | AttemptFailed) -> None:
            if done.done():
                return
            if isinstance(chunk, AttemptFailed):
                done.set_exception(from_code(chunk.code, chunk.message))
                return
            times.append(at)
            if chunk.finish_reason is not None or not relayed:
                done.set_result(None)

        self._waiting[key] = on_chunk
        asked = EngineRequest(pack_ids(prompt), sampling)
        decode = self._peers["decode"] if relayed else self.unwilling
        started = time.perf_counter()
        if relayed:
            request = DecodeRequest(key, asked, pack_ids(), self._peers["prefill"], _TIMEOUT_S)
            self._links["decode"].send(request)
        self._links["prefill"].send(PrefillRequest(key, asked, pack_ids(), decode, _TIMEOUT_S))
        try:
            await asyncio.wait_for(done, _TIMEOUT_S)
        finally:
            del self._waiting[key]
            for link in self._links.values():
                link.send(Abort(key))
        return times[0] - started, times[-1] - started

    def _on_message(self, role: str, message: Message) -> None:
        now = time.perf_counter()
        if isinstance(message, Pong):
            self.loads[role] = message.load
            return
        parts: list[TokenChunk] | list[AttemptFailed] = []
        if isinstance(message, TokenBatch):
            parts = message.chunks
        elif isinstance(message, AttemptFailed):
            parts = [message]
        for part in parts:
            waiting = self._waiting.get(part.key)
            if waiting is not None:
                waiting(now, part)

    def _on_lost(self, reason: str) -> None:
        raise RuntimeError(f"a node was lost during the benchmark: {reason}")

    async def _ping(self) -> None:
        while True:
            for link in self._links.values():
                link.send(Ping(self._name, _LEASE_S))
            await asyncio.sleep(_LEASE_S / 6)
