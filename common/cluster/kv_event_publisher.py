"""Publishes to Redis which KV blocks a node owns: the set of blocks, and a stream of its changes.

Runs on the asyncio loop of a node's leader. One script writes everything; it first checks that this incarnation may
still write for its node id. Stream entries are numbered without gaps; an entry of kind `reset` starts a new set. If
Redis has lost data, or may have lost some, the whole set is published again. `router.index.kv_event_subscriber` reads it;
docs/redis.md describes the keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Literal

from common.base.clock import Clock, monotonic, until_next
from common.base.hashing import HASH_BYTES, BlockHash
from common.base.sentences import counted
from common.cluster.membership import LEASE_IN_REDIS
from common.cluster.redis_client import UNREACHABLE, connect, forget_connections, honour_cancellation, short
from common.cluster.redis_keys import Keys
from common.cluster.redis_scripts import HEAL
from common.control.messages import PeerRef
from common.kv.journal import BlockJournal

log = logging.getLogger(__name__)

PERIOD_S = 0.05
"""Maximum delay from a change to its publication."""
BATCH_BLOCKS = 4096
"""Maximum number of blocks in one entry; 64 KiB."""
STREAM_LENGTH = 256
"""Number of entries that the stream keeps; a reader that is further behind reads the whole set instead."""
_RETRY_S = 0.2
_LEAP = 2**20
"""Added to the entry number after an error, because commands that got no answer may still run, late and in any order, and
each may add an entry."""

# KEYS: fence, events, blocks. ARGV: incarnation, lease in ms, kind, number of the last entry, number of blocks after
# this entry, maximum stream length, bytes of a hash, stored, removed. Returns the number of the last entry; 0: no lease
# in Redis (yet); -1: another incarnation has the node id; -2: Redis does not contain what was published.
_PUBLISH = (
    HEAL
    + """
heal(KEYS[1], 'hash') heal(KEYS[2], 'stream') heal(KEYS[3], 'set')
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
redis.call('PEXPIRE', KEYS[3], ARGV[2]) -- now, since the set may be new and nothing may follow
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
)

Kind = Literal["change", "reset", "renew"]


class KvEventPublisher:
    """Keeps the set of blocks in Redis equal to the one in the journal of this node's block pool."""

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
        self._owned: set[BlockHash] = set()
        self._published = 0
        """Number of blocks that Redis should contain."""
        self._up_to_date = False
        """Whether Redis contains everything taken from the journal."""
        self._renewal_due_s = float("-inf")
        self._away = False
        self.last_entry = 0
        """Upper bound of all entry numbers."""

    async def run(self) -> None:
        """Publish until cancelled, through any outage of Redis."""
        try:
            while True:
                try:
                    wait_s = await self._round()
                    self._away = False
                except UNREACHABLE as error:
                    # The entry may have been written: no later entry may reuse a number that a router has read.
                    self._up_to_date = False
                    self.last_entry += _LEAP
                    if not self._away:
                        log.warning(
                            "Redis is unavailable (%s); this node's blocks will be published again later", short(error)
                        )
                    self._away = True
                    await forget_connections(self._client)
                    wait_s = _RETRY_S
                honour_cancellation()
                if wait_s:
                    await asyncio.sleep(wait_s)
                if self._up_to_date:
                    await self._wait_for_change()
        finally:
            self._journal.notify_once(None)
            await self._client.aclose()

    async def _wait_for_change(self) -> None:
        """Return when the journal has changes, or when the lease of the keys in Redis must be renewed."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._journal.notify_once(lambda: loop.call_soon_threadsafe(changed.set))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._renewal_due_s - self._clock())):
                await changed.wait()

    async def _round(self) -> float:
        """Publish the latest changes, or renew the keys. Returns the shortest pause before the next round, in seconds."""
        stored, removed = self._journal.take()
        self._owned |= stored
        self._owned -= removed
        if not self._up_to_date:
            self._published = 0
            self._up_to_date = await self._write("reset", (), ()) and await self._publish(self._owned, ())
        elif stored or removed:
            self._up_to_date = await self._publish(stored, removed)
        elif self._clock() >= self._renewal_due_s:
            self._up_to_date = await self._write("renew", (), ())
            if self._up_to_date:
                return 0.0
        return PERIOD_S if self._up_to_date else _RETRY_S

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
                log.info(
                    "Redis lost what this node published; publishing all of it again: %s",
                    counted(len(self._owned), "block"),
                )
            if self.last_entry:
                self.last_entry += _LEAP
            return False
        now_s = self._clock()
        self._renewal_due_s = now_s + until_next(self._lease_s / 3, now_s)
        self.last_entry, self._published = answer, count
        return True
