"""A node tells Redis which blocks it holds: the owned set itself, and a stream of its changes.

Runs on the asyncio loop of a node's leader. Everything is written by one script, which first looks whether this
incarnation still is the one that may write for its node id. The stream's entries are numbered without a gap; an entry
of kind `reset` says that the set begins anew. Whatever Redis has forgotten, or may have, is published as a whole again.
`router.index.kv_event_subscriber` reads it; docs/redis.md has the keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Literal

from common.base.clock import Clock, monotonic
from common.base.hashing import HASH_BYTES, BlockHash
from common.cluster.membership import LEASE_IN_REDIS
from common.cluster.redis_client import UNREACHABLE, connect, forget_connections, honour_cancellation, short
from common.cluster.redis_keys import Keys
from common.control.messages import PeerRef
from common.kv.journal import BlockJournal

log = logging.getLogger(__name__)

PERIOD_S = 0.05
"""A change is published at most so long after it."""
BATCH_BLOCKS = 4096
"""Blocks of one entry; 64 KiB."""
STREAM_LENGTH = 256
"""Entries kept; a reader that is further behind takes the whole set instead."""
_RETRY_S = 0.2
_LEAP = 2**20
"""In doubt the next number is so much higher: of the commands whose answers never came any number may have been executed,
in any order and late, and each of them may have left an entry."""

# KEYS: fence, events, blocks. ARGV: incarnation, lease in ms, kind, number of the last entry, blocks held after this
# entry, longest stream, bytes of a hash, stored, removed. Answers the number of the last entry; 0: no lease in Redis
# (yet); -1: another incarnation has the node id; -2: Redis holds something else than was published.
_PUBLISH = """
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if not holder then return 0 end
if holder ~= ARGV[1] then return -1 end
local kind, size = ARGV[3], tonumber(ARGV[7])
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local last = newest and tonumber(string.match(newest[1], '^%d+')) or 0
if kind == 'reset' then
  redis.call('DEL', KEYS[3])
  last = math.max(last, tonumber(ARGV[4]))
elseif last ~= tonumber(ARGV[4]) then
  return -2
end
local function apply(command, blob)
  local members = {}
  for at = 1, #blob, size do
    members[#members + 1] = string.sub(blob, at, at + size - 1)
    if #members == 1000 or at + size > #blob then
      redis.call(command, KEYS[3], unpack(members))
      members = {}
    end
  end
end
apply('SADD', ARGV[8])
apply('SREM', ARGV[9])
redis.call('PEXPIRE', KEYS[3], ARGV[2]) -- whatever comes next, or never: the set may be new
if redis.call('SCARD', KEYS[3]) ~= tonumber(ARGV[5]) then return -2 end
if kind ~= 'renew' then
  local now = redis.call('TIME')
  local at = now[1] * 1000 + math.floor(now[2] / 1000)
  last = last + 1
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[6], string.format('%d-0', last),
    'kind', kind, 'tier', 'device', 'at', string.format('%d', at), 'stored', ARGV[8], 'removed', ARGV[9])
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return last
"""

Kind = Literal["change", "reset", "renew"]


class KvEventPublisher:
    """Keeps what Redis says of this node's blocks equal to its pool's journal."""

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        peer: PeerRef,
        journal: BlockJournal,
        *,
        lease_s: float,
        clock: Clock = monotonic,
    ) -> None:
        keys = Keys(cluster)
        self._client = connect(redis_url)
        self._incarnation = peer.incarnation
        self._keys = (keys.fence(peer.node_id), keys.events(peer.incarnation), keys.blocks(peer.incarnation))
        self._journal = journal
        self._lease_s = lease_s
        self._clock = clock
        self._held: set[BlockHash] = set()
        self._published = 0
        """Blocks that Redis should know."""
        self._in_step = False
        """Redis holds all that was taken from the journal."""
        self._renewed_s = float("-inf")
        self._away = False
        self.last_entry = 0
        """No entry has a higher number."""

    async def run(self) -> None:
        """Publish for ever; through any outage of Redis."""
        try:
            while True:
                wait_s = PERIOD_S
                try:
                    if not await self._round():
                        wait_s = _RETRY_S
                    self._note(None)
                except UNREACHABLE as error:
                    # It may have been written or not. No later entry may have the number of one that a router has read.
                    self._in_step = False
                    self.last_entry += _LEAP
                    self._note(short(error))
                    await forget_connections(self._client)
                    wait_s = _RETRY_S
                honour_cancellation()
                await asyncio.sleep(wait_s)
        finally:
            await self._client.aclose()

    async def _round(self) -> bool:
        """Publish what there is. Returns whether Redis is in step."""
        stored, removed = self._journal.take()
        self._held |= stored
        self._held -= removed
        if not self._in_step:
            self._published = 0
            self._in_step = await self._write("reset", (), ()) and await self._publish(self._held, ())
        elif stored or removed:
            self._in_step = await self._publish(stored, removed)
        elif self._clock() - self._renewed_s > self._lease_s / 3:
            self._in_step = await self._write("renew", (), ())
        return self._in_step

    async def _publish(self, stored: Collection[BlockHash], removed: Collection[BlockHash]) -> bool:
        gone, new = list(removed), list(stored)
        for start in range(0, max(len(gone), len(new)), BATCH_BLOCKS):
            piece = slice(start, start + BATCH_BLOCKS)
            if not await self._write("change", new[piece], gone[piece]):
                return False
        return True

    async def _write(self, kind: Kind, stored: Collection[BlockHash], removed: Collection[BlockHash]) -> bool:
        count = self._published + len(stored) - len(removed)
        answer = await self._client.eval(
            _PUBLISH,
            len(self._keys),
            *self._keys,
            self._incarnation,
            max(1, round(self._lease_s * LEASE_IN_REDIS * 1000)),
            kind,
            self.last_entry,
            count,
            STREAM_LENGTH,
            HASH_BYTES,
            b"".join(stored),
            b"".join(removed),
        )
        if answer <= 0:
            if answer == -2:
                log.info("Redis does not hold what this node published; publishing all %d blocks", len(self._held))
            if self.last_entry:
                self.last_entry += _LEAP
            return False
        self.last_entry, self._published, self._renewed_s = answer, count, self._clock()
        return True

    def _note(self, error: str | None) -> None:
        if error is not None and not self._away:
            log.warning("Redis is away (%s); this node's blocks will be published again when it is back", error)
        self._away = error is not None
