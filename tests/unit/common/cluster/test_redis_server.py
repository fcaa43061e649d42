"""The Redis server that kvrelay starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest
import redis
from support.paths import ROOT
from support.redis_server import RedisServer, answers_ping

from common.base.errors import ConfigError
from common.cluster.redis_server import find_redis_binary


def test_it_is_a_real_server_with_every_redis_feature_in_use() -> None:
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value", px=40)
        assert 0 < client.pttl("key") <= 40
        client.xadd("stream", {"field": "1"})
        assert len(client.xrange("stream")) == 1
        assert client.eval("return redis.call('SET', KEYS[1], ARGV[1])", 1, "lua", "2") == b"OK"
        assert client.config_get("save")["save"] == ""
        assert client.config_get("bind")["bind"] == "127.0.0.1"


def test_stopping_leaves_neither_process_nor_files() -> None:
    server = RedisServer()
    server.start()
    pid, directory = server.pid, psutil.Process(server.pid).cwd()
    server.stop()
    assert not psutil.pid_exists(pid)
    assert not os.path.exists(directory)
    server.stop()


def test_restart_keeps_the_address_and_loses_the_data() -> None:
    with RedisServer() as server:
        url, pid = server.url, server.pid
        with redis.Redis.from_url(url) as client:
            client.set("key", "value")
        server.kill()
        assert not answers_ping(url)
        server.restart()
        assert server.url == url
        assert server.pid != pid
        with redis.Redis.from_url(url) as client:
            assert client.get("key") is None


def test_taken_port_is_one_clear_error_even_if_another_redis_has_it() -> None:
    with RedisServer() as other, pytest.raises(ConfigError, match="did not start: Failed listening on port"):
        RedisServer(port=other.port).start()


def test_port_taken_by_a_silent_program_is_reported() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ConfigError, match="did not start: Failed listening on port"):
            RedisServer(port=holder.getsockname()[1]).start()


def test_it_dies_with_its_parent_however_the_parent_dies() -> None:
    code = (
        "import sys, time\nfrom support.redis_server import RedisServer\n"
        "s = RedisServer(); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    path = f"{ROOT}:{ROOT / 'tests'}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={"PYTHONPATH": path}) as parent:
        assert parent.stdout is not None
        redis_process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    redis_process.wait(timeout=5)


def test_without_any_server_program_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install redis-server or valkey-server"):
        find_redis_binary()
