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


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis:/10.0.0.1:6379/0", "it has no ://"),
        ("redis:10.0.0.1", "it has no ://"),
        ("redis://h/abc", "not the number of a database"),
        ("redis://h/0/1", "not the number of a database"),
        ("redis+cluster://h/abc?protocol=3", "not the number of a database"),
        ("redis://h/0#x", "not the number of a database"),
        ("redis+sentinel://h", "not the name of a service"),
        ("redis+sentinel://h/kv/abc", "not the name of a service"),
        ("redis+sentinel://h:x/kv", "Port could not be cast"),
        ("redis+sentinel://h:1,/kv", "one of its hosts is empty"),
        ("redis://:p@ss#w/ord@10.0.0.1/0", "percent-encode"),
        ("redis://:pass?x@10.0.0.1/0", "percent-encode"),
        ("redis://:pass?ord=0@10.0.0.1/0", "percent-encode"),
        ("redis://10.0.0.1/abc?password=w@ss", "not the number of a database"),
    ],
)
def test_mistyped_url_leads_to_no_other_redis(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        connect(url)
    assert not [part for part in ("ss", "ord", "pass") if part in str(caught.value).replace("password", "")]


@pytest.mark.parametrize("scheme", ["redis://h/0", "unix:///s", "redis+cluster://h", "redis+sentinel://h/kv"])
@pytest.mark.parametrize(
    "option", ["decode_responses=true", "encoding=utf-16", "socket_timeout=0", "socket_connect_timeout=9"]
)
def test_options_that_the_protocol_depends_on_are_refused(scheme: str, option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"its option {name} is not allowed"):
        connect(f"{scheme}?protocol=3&{option}")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", ("h", None, None)),
        ("redis://u:p%40%2F@h:7/3", ("h", 7, 3)),
        ("redis://[::1]:7/?password=a@b", ("::1", 7, None)),
        ("redis://:p@ss@h:7/3", ("h", 7, 3)),
        ("redis://h:7/3/", ("h", 7, 3)),
        ("redis://h:7/3?", ("h", 7, 3)),
    ],
)
def test_well_formed_url_is_understood(url: str, expected: tuple[str, int | None, int | None]) -> None:
    options = connect(url).connection_pool.connection_kwargs
    assert (options["host"], options.get("port"), options.get("db")) == expected


def test_sentinels_may_have_ipv6_addresses() -> None:
    pool = connect("redis+sentinel://u:p%40@[::1],[fd00::7]:7,h/kv/3/?protocol=3&sentinel_password=a+b").connection_pool
    watcher = pool.sentinel_manager.sentinels[0].connection_pool
    assert watcher.connection_kwargs["password"] == "a+b"
    found = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(options["host"], options["port"]) for options in found] == [("::1", 26379), ("fd00::7", 7), ("h", 26379)]
    assert (pool.service_name, pool.connection_kwargs["db"], pool.connection_kwargs["password"]) == ("kv", 3, "p@")


def test_sentinels_are_checked_against_the_same_authority_as_the_server_they_name() -> None:
    pool = connect("rediss+sentinel://:pw@127.0.0.1:1/kv?ssl_ca_certs=/ca.pem").connection_pool
    assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    watcher = pool.sentinel_manager.sentinels[0].connection_pool
    assert watcher.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    assert watcher.connection_kwargs.get("password") is None
