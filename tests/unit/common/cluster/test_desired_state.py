from __future__ import annotations

import asyncio

import pytest
from support.redis_server import RedisServer

from common.base.errors import BadRequest, NotFound
from common.cluster.desired_state import change_desired, checked_counts, read_desired, write_desired
from common.cluster.redis_client import connect
from common.cluster.redis_keys import Keys


def test_counts_are_kept_and_changed_role_by_role(redis_server: RedisServer, cluster: str) -> None:
    async def scene() -> None:
        client, keys = connect(redis_server.url), Keys(cluster)
        try:
            assert await read_desired(client, keys) is None
            with pytest.raises(NotFound, match="nothing keeps the shape"):
                await change_desired(client, keys, {"prefill": 3})
            await write_desired(client, keys, {"prefill": 1, "decode": 2})
            assert await change_desired(client, keys, {"prefill": 6}) == {"prefill": 6, "decode": 2}
            assert await read_desired(client, keys) == {"prefill": 6, "decode": 2}
            await client.set(keys.desired, "{broken")
            assert await read_desired(client, keys) is None
        finally:
            await client.aclose()

    asyncio.run(scene())


def test_where_nodes_only_trade_roles_one_number_says_the_other(redis_server: RedisServer, cluster: str) -> None:
    async def scene() -> None:
        client, keys = connect(redis_server.url), Keys(cluster)
        try:
            await write_desired(client, keys, {"prefill": 2, "decode": 2, "total": 4})
            assert await change_desired(client, keys, {"prefill": 1}) == {"prefill": 1, "decode": 3, "total": 4}
            for changes in ({"prefill": 4}, {"decode": 4}, {"prefill": 2, "decode": 3}, {"total": 5}):
                with pytest.raises(BadRequest):
                    await change_desired(client, keys, changes)
        finally:
            await client.aclose()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ([1], "are not an object"),
        ({"router": 1}, "router is no role that can be scaled"),
        ({"decode": 0}, "decode must be a number from 1 to 1000"),
        ({"prefill": -1}, "prefill must be a number from 0 to 1000"),
        ({"prefill": True}, "prefill must be a number"),
        ({"prefill": 2.5}, "prefill must be a number"),
        ({"prefill": 1001}, "prefill must be a number"),
        ({"prefill": 0, "decode": 3, "total": 3}, "prefill must be a number from 1 to 1000"),
    ],
)
def test_what_is_no_number_of_nodes_is_refused(counts: object, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        checked_counts(counts)
