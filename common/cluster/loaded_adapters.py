"""Reads from Redis which LoRA adapters an operator had loaded into a node. Runs on the asyncio loop of the node."""

from __future__ import annotations

import logging

from common.cluster.records import LoadedAdapters, Records
from common.cluster.redis_client import UNREACHABLE, connect, short
from common.cluster.redis_keys import Keys

log = logging.getLogger(__name__)


async def read_loaded_adapters(
    redis_url: str, cluster: str, node_id: str, tls_dir: str | None
) -> LoadedAdapters | None:
    """Read which adapters had been loaded into the last process with this node id. If the list cannot be read now, log that and
    return None."""
    client = connect(redis_url)
    try:
        raw = await client.get(Keys(cluster).adapters(node_id))
    except UNREACHABLE as error:
        log.warning("cannot read which LoRA adapters had been loaded into this node: %s", short(error))
        return None
    finally:
        await client.aclose()
    return Records(cluster, tls_dir).decode_loaded(raw, node_id)
