"""What a node that listens here or there registers as its address."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.redis_server import RedisServer

from common.base.errors import ConfigError
from common.cluster import address
from common.cluster.address import HostAddresses, source_address
from common.config.service_configs import DecodeConfig
from common.config.sources import resolve
from common.control.links import Link
from common.control.messages import NodeLoad, Ping, Pong
from common.node.server import NodeServer

REDIS = "redis://127.0.0.1:6379/0"


def addresses(**values: object) -> HostAddresses:
    return HostAddresses.of(DecodeConfig(redis_url=REDIS, **values))  # type: ignore[arg-type]


def test_an_explicit_interface_is_advertised_as_it_is() -> None:
    assert addresses(host="192.0.2.7").advertised("tcp://192.0.2.7:7001") == "tcp://192.0.2.7:7001"


@pytest.mark.parametrize("bound", ["0.0.0.0", "[::]"])
def test_every_interface_becomes_the_one_that_routes_to_redis(bound: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert addresses(host="0.0.0.0").advertised(f"tcp://{bound}:7001") == "tcp://127.0.0.1:7001"
    assert "only this machine can reach" in caplog.text


def test_an_admin_port_on_every_interface_is_registered_with_the_nodes_address() -> None:
    url = "http://0.0.0.0:7005"
    assert addresses(admin_host="0.0.0.0").advertised(url) == "http://127.0.0.1:7005"
    assert addresses(admin_host="0.0.0.0", advertise_host="192.0.2.9").advertised(url) == "http://192.0.2.9:7005"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("gpu-7.example", "tcp://gpu-7.example:7001"),
        ("192.0.2.9", "tcp://192.0.2.9:7001"),
        ("fd00::7", "tcp://[fd00::7]:7001"),
    ],
)
def test_what_the_operator_says_wins(host: str, expected: str) -> None:
    assert addresses(host="0.0.0.0", advertise_host=host).advertised("tcp://0.0.0.0:7001") == expected
    assert addresses(advertise_host=host).advertised("tcp://127.0.0.1:7001") == expected


def test_each_tcp_endpoint_of_a_data_address_is_rewritten_and_nothing_else() -> None:
    offers = "zmq+tcp://0.0.0.0:7002 shm+unix://3f2a/kvrelay-71be nccl+tcp://0.0.0.0:7005#GPU-5e-1"
    expected = "zmq+tcp://gpu-7:7002 shm+unix://3f2a/kvrelay-71be nccl+tcp://gpu-7:7005#GPU-5e-1"
    assert addresses(host="0.0.0.0", advertise_host="gpu-7").advertised(offers) == expected
    assert "zmq+tcp://127.0.0.1:7002 shm" in addresses(host="0.0.0.0").advertised(offers)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "tcp://192.0.2.9", "192.0.2.9:7001", "a b", "[fd00::7]", "user@host"]
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="advertise_host"):
        addresses(advertise_host=host).advertised("tcp://127.0.0.1:7001")


@pytest.mark.parametrize(
    ("host", "nnodes", "expected"),
    [
        ("0.0.0.0", 1, "127.0.0.1"),
        ("192.0.2.7", 1, "127.0.0.1"),
        ("0.0.0.0", 2, "127.0.0.1"),
        ("192.0.2.7", 2, "192.0.2.7"),
    ],
)
def test_ranks_meet_where_nobody_else_needs_to_reach_them(host: str, nnodes: int, expected: str) -> None:
    """On one host: loopback. On two, for `0.0.0.0`: the address that routes to Redis, which here is on loopback."""
    assert addresses(host=host, nnodes=nnodes, advertise_host="192.0.2.99").for_ranks == expected


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7"])
def test_ranks_on_cards_take_the_interface_of_relays_to_other_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL settles on one for the whole process."""
    monkeypatch.setattr(address, "source_address", lambda _: "192.0.2.7")
    node = addresses(host=host)
    assert node.for_mesh(on_gpus=True) == node.one_interface == "192.0.2.7"
    assert node.for_mesh(on_gpus=False) == "127.0.0.1"


def test_a_redis_without_a_route_is_a_configuration_error_without_its_password() -> None:
    with pytest.raises(ConfigError, match="--advertise-host") as caught:
        source_address("redis://:secret@no-such-host.invalid:6379/0")
    assert "secret" not in str(caught.value)


def test_a_redis_behind_a_socket_file_is_on_this_machine() -> None:
    assert source_address("unix:///run/redis.sock") == "127.0.0.1"


@pytest.mark.parametrize("first", ["127.0.0.1:26379", "127.0.0.1", "[::1]:26379"])
def test_of_several_sentinels_the_first_one_shows_the_way(first: str) -> None:
    assert source_address(f"redis+sentinel://{first},192.0.2.1:26379/kv") in ("127.0.0.1", "::1")


def test_the_flag_reaches_both_kinds_of_node() -> None:
    flags = {"advertise_host": "node-1"}
    assert resolve(DecodeConfig, flags=flags, environ={}, file=None).config.advertise_host == "node-1"
    environ = {"KVRELAY_ADVERTISE_HOST": "node-2"}
    assert resolve(DecodeConfig, flags={}, environ=environ, file=None).config.advertise_host == "node-2"


def test_a_shell_listens_on_every_interface_and_registers_one_that_can_be_reached(redis_server: RedisServer) -> None:
    async def check() -> tuple[str, Pong]:
        shell = NodeServer(DecodeConfig(node_id="decode-x", redis_url=redis_server.url, host="0.0.0.0"))
        await shell.bind()
        answer: asyncio.Future[Pong] = asyncio.get_running_loop().create_future()
        link = Link(shell.me.control_address, answer.set_result, print)  # type: ignore[arg-type]
        try:
            link.send(Ping("router-x", 1.0))
            return shell.me.control_address, await asyncio.wait_for(answer, 20)
        finally:
            link.close()
            await shell._server.close()

    address, pong = asyncio.run(check())
    assert address.startswith("tcp://127.0.0.1:")
    assert (pong.node_id, pong.load) == ("decode-x", NodeLoad())


def test_a_probe_begins_no_lease(redis_server: RedisServer) -> None:
    """Else its end would abort requests, or at least frighten whoever reads the log."""

    async def leases(lease_s: float) -> int:
        shell = NodeServer(DecodeConfig(node_id="decode-x", redis_url=redis_server.url))
        await shell.bind()
        answer: asyncio.Future[Pong] = asyncio.get_running_loop().create_future()
        link = Link(shell.me.control_address, answer.set_result, print)  # type: ignore[arg-type]
        try:
            link.send(Ping("someone", lease_s))
            await asyncio.wait_for(answer, 20)
            return len(shell._leases)
        finally:
            link.close()
            await shell._server.close()

    assert asyncio.run(leases(1.0)) == 1
    assert asyncio.run(leases(0.0)) == 0
