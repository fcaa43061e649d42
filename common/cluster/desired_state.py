"""How many nodes of each role a cluster wants. In Redis, so that it outlives the process that makes it so (docs/ray.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.base.errors import BadRequest, NotFound
from common.cluster.redis_keys import Keys

if TYPE_CHECKING:  # `kvrelay admin` imports this module, and no Redis client
    from common.cluster.redis_client import RedisClient
    from common.control.messages import Role

Counts = dict[str, int]
"""Nodes by role, and `TOTAL` if there can be neither more nor fewer."""
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
"""The role that a node can change to, by its present one."""
SCALED_ROLES: tuple[Role, ...] = ("prefill", "decode")
TOTAL = "total"
"""Key of the number of nodes on a machine, which only trade roles."""
MOST = 1000


async def read_desired(client: RedisClient, keys: Keys) -> Counts | None:
    """The counts in Redis; None if nothing keeps this cluster's shape, or what is there is damaged. Raises: UNREACHABLE."""
    return parsed_counts(await client.get(keys.desired))


def parsed_counts(data: bytes | None) -> Counts | None:
    """The counts in the value of `Keys.desired`; None without a value, and for a damaged one."""
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
        raise NotFound(
            "nothing keeps the shape of this cluster: `kvrelay up` does, with a Redis of its own or on Ray, and routers "
            "with --planner publish tell it to an autoscaler"
        )
    if TOTAL in changes:
        raise BadRequest(
            "the number of all nodes is that of the nodes on this machine: it cannot be changed", param=TOTAL
        )
    counts = checked_counts({**wanted, **_other_role(wanted, changes), **changes})
    await write_desired(client, keys, counts)
    return counts


def _other_role(wanted: Counts, changes: Mapping[str, object]) -> Counts:
    """Return the count of the role that `changes` leaves out, where nodes only trade roles and one count gives the other."""
    if TOTAL in wanted and len(changes) == 1:
        for role in SCALED_ROLES:
            if type(count := changes.get(role)) is int:
                return {OTHER[role]: wanted[TOTAL] - count}
    return {}


def shown(counts: Counts) -> str:
    """Format counts for messages, such as `prefill 2, decode 1`."""
    return ", ".join(f"{role} {counts[role]}" for role in SCALED_ROLES if role in counts)


def checked_counts(counts: object) -> Counts:
    """Check counts that came from outside.

    Raises: BadRequest if these are no counts of nodes by role, if there would be no decode node, or if the number of nodes that
    only trade roles would change.
    """
    if not isinstance(counts, dict):
        raise BadRequest("the numbers of nodes are not an object")
    checked: Counts = {}
    for role, count in counts.items():  # pyright: ignore[reportUnknownVariableType] - checked here
        if role == TOTAL and type(count) is int:  # pyright: ignore[reportUnknownArgumentType]
            checked[TOTAL] = count
            continue
        if role not in SCALED_ROLES:
            raise BadRequest(f"{str(role)[:40]} is no role that can be scaled: {' and '.join(SCALED_ROLES)} are")  # pyright: ignore[reportUnknownArgumentType]
        low = 0 if role == "prefill" and TOTAL not in counts else 1  # the last node of a role cannot change
        if type(count) is not int or not low <= count <= MOST:  # pyright: ignore[reportUnknownArgumentType]
            raise BadRequest(f"{role} must be a number from {low} to {MOST}", param=role)
        checked[role] = count
    total = checked.get(TOTAL)
    if total is not None and sum(checked.get(role, 0) for role in SCALED_ROLES) != total:
        raise BadRequest(f"there are {total} nodes on this machine, which only trade roles: that many must be wanted")
    return checked
