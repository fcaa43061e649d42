"""What was changed in a node while it ran, in Redis: its role, and the LoRA adapters loaded into it. Also who may change a role
now. Runs on the node's asyncio loop.
"""

from __future__ import annotations

import logging
from typing import cast

from common.base.errors import BadRequest, Unavailable
from common.cluster.desired_state import OTHER, TOTAL, read_desired
from common.cluster.records import LoadedAdapters, Records
from common.cluster.redis_client import UNREACHABLE, brief_client, connect, short, tolerated
from common.cluster.redis_keys import Keys
from common.control.messages import NodeRecord, Role

log = logging.getLogger(__name__)

HELD_S = 6.0
"""How long the right to change roles lasts without a renewal."""

# KEYS: flip. ARGV: transaction, milliseconds. Returns whether this transaction may change roles.
_TAKE = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS: flip. ARGV: transaction.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"

# KEYS: desired. ARGV: old role, new role. One node less of the old role is wanted, and one more of the new one.
_MOVE = """
local known, wanted = pcall(cjson.decode, redis.call('GET', KEYS[1]) or '')
if known and type(wanted) == 'table' and wanted[ARGV[1]] and wanted[ARGV[2]] then
  wanted[ARGV[1]], wanted[ARGV[2]] = wanted[ARGV[1]] - 1, wanted[ARGV[2]] + 1
  redis.call('SET', KEYS[1], cjson.encode(wanted))
end
return 1
"""


async def read_changed_role(redis_url: str, cluster: str, node_id: str) -> Role | None:
    """The role that the node's last process had, if it was changed while it ran; None also if Redis does not answer."""
    async with brief_client(redis_url, log, "cannot read whether this node's role was changed") as client:
        found = await client.get(Keys(cluster).role(node_id))
        return "prefill" if found == b"prefill" else "decode" if found == b"decode" else None
    return None


async def forget_changed_role(redis_url: str, cluster: str, node_id: str) -> None:
    """Let the node's next process have the role of its command."""
    async with brief_client(redis_url, log, "cannot forget this node's changed role") as client:
        await client.delete(Keys(cluster).role(node_id))


async def read_loaded_adapters(
    redis_url: str, cluster: str, node_id: str, tls_dir: str | None
) -> LoadedAdapters | None:
    """The LoRA adapters that had been loaded into the last process with this node id; None if they cannot be read."""
    async with brief_client(redis_url, log, "cannot read which LoRA adapters had been loaded into this node") as client:
        return Records(cluster, tls_dir).decode_loaded(await client.get(Keys(cluster).adapters(node_id)), node_id)
    return None


class FlipLock:
    """The right to change roles in a cluster. One transaction has it at a time, which may change several nodes one after the
    other: so none of them is the last of its role when its turn comes."""

    def __init__(self, redis_url: str, cluster: str, tls_dir: str | None) -> None:
        self._client = connect(redis_url)
        self._keys = Keys(cluster)
        self._records = Records(cluster, tls_dir)

    async def take(self, transaction: str, node: NodeRecord) -> None:
        """Take the right, or renew it.

        Raises: BadRequest if another transaction has it, `node` is the last one of its role, or its role is not to be changed;
        Unavailable without Redis.
        """
        try:
            wanted = await read_desired(self._client, self._keys)
            if wanted is not None and TOTAL not in wanted:
                raise BadRequest("`kvrelay up --on ray` keeps as many nodes of each role as `kvrelay admin scale` says")
            if not await self.renew(transaction):
                raise BadRequest("another node changes its role at this moment: try again when it has done so")
            if not await self._has_companion(node):
                await self.release(transaction)
                raise BadRequest(
                    f"{node.peer.node_id} is the only {node.role} node of {node.model.name}: it must keep its role"
                )
        except UNREACHABLE as error:
            raise Unavailable(f"no role can be changed while Redis is away: {short(error)}") from error

    async def move_wanted(self, node: NodeRecord) -> None:
        """From now on want one node less of the role of `node`, and one more of the other role."""
        with tolerated(log, "the wanted numbers of nodes stay as they are"):
            await self._client.eval(_MOVE, 1, self._keys.desired, node.role, OTHER[node.role])

    async def renew(self, transaction: str) -> bool:
        """Hold the right for another `HELD_S`. Returns whether the transaction has it. Raises: UNREACHABLE."""
        return bool(await self._client.eval(_TAKE, 1, self._keys.flip, transaction, round(1000 * HELD_S)))

    async def release(self, transaction: str) -> None:
        """Let others change roles. Without Redis the right ends by itself."""
        with tolerated(log, f"the right to change roles ends in {HELD_S:g} s"):
            await self._client.eval(_RELEASE, 1, self._keys.flip, transaction)

    async def close(self) -> None:
        await self._client.aclose()

    async def _has_companion(self, node: NodeRecord) -> bool:
        """Whether another registered node has the role and model of `node`."""
        ids: list[bytes] = await self._client.zrange(self._keys.nodes, 0, -1)
        names = [self._keys.node(each.decode("utf-8", "replace")) for each in ids]
        values = cast("list[bytes | None]", await self._client.mget(names)) if names else []
        others = [self._records.decode(value) for value in values if value]
        return any(
            other is not None
            and (other.role, other.model.name) == (node.role, node.model.name)
            and other.peer.node_id != node.peer.node_id
            for other in others
        )
