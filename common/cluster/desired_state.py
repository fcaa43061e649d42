"""How many nodes of each role a cluster wants. In Redis, so that it outlives the process that makes it so (docs/ray.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from common.base.errors import BadRequest, NotFound
from common.cluster.redis_client import RedisClient
from common.cluster.redis_keys import Keys

Counts = dict[str, int]
"""Nodes by role."""
SCALED_ROLES = ("prefill", "decode")
MOST = 1000


async def read_desired(client: RedisClient, keys: Keys) -> Counts | None:
    """The counts in Redis; None if nothing keeps this cluster's shape, or what is there is damaged. Raises: UNREACHABLE."""
    data = await client.get(keys.desired)
    try:
        return checked_counts(json.loads(data)) if data else None
    except (ValueError, BadRequest):
        return None


async def write_desired(client: RedisClient, keys: Keys, counts: Counts) -> None:
    """Raises: UNREACHABLE."""
    await client.set(keys.desired, json.dumps(counts))


async def change_desired(client: RedisClient, keys: Keys, changes: Mapping[str, object]) -> Counts:
    """Change the counts of some roles. Returns all of them. Raises: NotFound, BadRequest, UNREACHABLE."""
    wanted = await read_desired(client, keys)
    if wanted is None:
        raise NotFound("nothing keeps the shape of this cluster: only `kvrelay up --on ray` can be scaled")
    counts = checked_counts({**wanted, **changes})
    await write_desired(client, keys, counts)
    return counts


def checked_counts(counts: object) -> Counts:
    """Raises: BadRequest if these are no counts of nodes by role, or there would be no decode node."""
    if not isinstance(counts, dict):
        raise BadRequest("the numbers of nodes are not an object")
    checked: Counts = {}
    for role, count in counts.items():  # pyright: ignore[reportUnknownVariableType] - checked here
        if role not in SCALED_ROLES:
            raise BadRequest(f"{str(role)[:40]} is no role that can be scaled: {' and '.join(SCALED_ROLES)} are")  # pyright: ignore[reportUnknownArgumentType]
        low = 1 if role == "decode" else 0
        if type(count) is not int or not low <= count <= MOST:  # pyright: ignore[reportUnknownArgumentType]
            raise BadRequest(f"{role} must be a number from {low} to {MOST}", param=role)
        checked[role] = count
    return checked
