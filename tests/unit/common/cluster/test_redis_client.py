"""Redis URLs: errors come soon and never show a password."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from common.base.errors import ConfigError
from common.cluster.redis_client import check_redis, connect


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "redis://nowhere.invalid:6379/0", "unix:///nowhere.sock"])
def test_unreachable_redis_is_reported_soon_in_one_sentence(url: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match="cannot reach Redis at") as caught:
        asyncio.run(check_redis(url))
    assert time.monotonic() - started_s < 6
    assert "\n" not in str(caught.value)


def test_redis_that_accepts_but_never_answers_is_reported_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConfigError, match="cannot reach Redis"):
        asyncio.run(asyncio.wait_for(check_redis(f"redis://127.0.0.1:{silent.getsockname()[1]}/0"), 6))


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@127.0.0.1:1/0",
        "redis://:sec/secret@127.0.0.1:1/0",
        "redis://:secret/x@127.0.0.1:1/0",
        "redis://:secret#x@127.0.0.1:1/0",
        "redis://:[secret@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=secret&protocol=3",
        "redis+sentinel://:secret/x@127.0.0.1:1/kv",
        "user:secret@127.0.0.1:1",
    ],
)
def test_password_is_never_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(check_redis(url))
    assert "secret" not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)


def test_sentinels_are_checked_against_the_same_authority_as_the_server_they_name() -> None:
    pool = connect("rediss+sentinel://:pw@127.0.0.1:1/kv?ssl_ca_certs=/ca.pem").connection_pool
    assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    watcher = pool.sentinel_manager.sentinels[0].connection_pool
    assert watcher.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    assert watcher.connection_kwargs.get("password") is None
