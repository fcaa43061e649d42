"""Stores responses in Redis: bounded in size, number and time, separately for each tenant. Runs on the router's event loop.

A lost response is an error for the client that continues it, never for another one. Only calls that name a response wait
for Redis, and those that store one, for at most `_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import Any, NamedTuple

from pydantic_core import from_json

from common.base.clock import monotonic
from common.base.errors import NotFound, Unavailable
from common.cluster.redis_client import UNREACHABLE, connect, short
from common.cluster.redis_keys import Keys
from common.cluster.redis_scripts import HEAL
from router.http.json_body import Json, to_json

log = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 256 * 1024
"""Larger ones are not stored."""
TTL_S = 24 * 3600
_TIMEOUT_S = 1.0
_REST_S = 5.0
"""Time after a failure in which nothing is stored, so that no answer waits for a Redis that is away."""

# KEYS: response, the tenant's responses, what the keys of all of these begin with. ARGV: id of the response, its data, seconds
# until they expire, most responses.
_PUT = (
    HEAL
    + """
heal(KEYS[2], 'zset')
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
-- Always later than the newest: a router or a Redis whose clock was ahead must not make what follows the oldest.
local time, newest = redis.call('TIME'), redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
local now = math.max(time[1] + time[2] / 1000000, (tonumber(newest) or 0) + 0.00001)
redis.call('ZADD', KEYS[2], string.format('%.6f', now), ARGV[1])
redis.call('PEXPIRE', KEYS[2], 1000 * ARGV[3])
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -(ARGV[4] + 1))) do
  redis.call('DEL', KEYS[3] .. id)
  redis.call('ZREM', KEYS[2], id)
end
"""
)
_ID = re.compile(r"resp_[0-9a-f]{24}")


class StoredResponse(NamedTuple):
    """A response, and the chat messages of its conversation with it, without instructions."""

    response: Json
    messages: list[Json]
    size_bytes: int = 0
    """Bytes that it takes in Redis; 0 while it is not stored."""


class ResponseStore:
    """`max_entries`: beyond it, the oldest ones of the same tenant are removed."""

    def __init__(self, redis_url: str, cluster: str, max_entries: int) -> None:
        self._client = connect(redis_url)
        self._keys = Keys(cluster)
        self._max_entries = max_entries
        self._rest_until_s = 0.0

    async def put(self, tenant: str, entry: StoredResponse) -> None:
        """Store a response. A failure is only logged: the client gets the answer anyhow."""
        data = to_json({"response": entry.response, "messages": entry.messages})
        if len(data) > MAX_ENTRY_BYTES:
            log.info("%s is not stored: it has more than %d bytes", entry.response["id"], MAX_ENTRY_BYTES)
            return
        if monotonic() < self._rest_until_s:
            return
        response_id, begin = str(entry.response["id"]), self._keys.response(f"{tenant}:")
        names = (begin + response_id, self._keys.responses(tenant), begin)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._client.eval(_PUT, len(names), *names, response_id, data, TTL_S, self._max_entries)
        except (*UNREACHABLE, TimeoutError) as error:
            self._rest_until_s = monotonic() + _REST_S
            log.warning("responses are not stored: Redis: %s", short(error))

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """The stored response. Raises: NotFound, also for another tenant's; Unavailable while Redis is away."""
        data = await self._ask(self._client.get(self._key(tenant, response_id)))
        if data is None:
            raise _unknown(response_id)
        try:
            return StoredResponse(**from_json(data), size_bytes=len(data))
        except (ValueError, TypeError):  # somebody else wrote it
            raise _unknown(response_id) from None

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a stored response. Raises: what `get` raises."""
        key = self._key(tenant, response_id)
        if not await self._ask(self._client.delete(key)):
            raise _unknown(response_id)
        with contextlib.suppress(Unavailable):  # it is deleted
            await self._ask(self._client.zrem(self._keys.responses(tenant), response_id))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _key(self, tenant: str, response_id: str) -> str:
        if not _ID.fullmatch(response_id):
            raise _unknown(response_id)
        return self._keys.response(f"{tenant}:{response_id}")

    async def _ask(self, answer: Any) -> Any:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await answer
        except (*UNREACHABLE, TimeoutError) as error:
            raise Unavailable(
                "stored responses cannot be reached now; send the whole conversation, or try again"
            ) from error


def _unknown(response_id: str) -> NotFound:
    return NotFound(
        f"there is no stored response {response_id[:64]!r}; it was never stored, has expired or belongs to another key",
        param="previous_response_id",
        code="response_not_found",
    )
