"""Which ports the routers of `kvrelay up` get, and what is said where they cannot have them."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from common.base.errors import ConfigError
from common.config.service_configs import UpConfig
from common.config.sources import resolve
from kvrelay.up.routers import router_places

Ports = Callable[[int], list[int]]


def test_a_single_router_keeps_its_name_and_its_ports(free_port: int) -> None:
    [router] = router_places(UpConfig(port=free_port))
    assert (router.name, router.port, router.url) == ("router", free_port, f"http://127.0.0.1:{free_port}")
    assert router.admin_port not in (0, free_port)


def test_several_routers_have_consecutive_ports_from_the_given_ones_on(ports_in_a_row: Ports) -> None:
    ports = ports_in_a_row(6)
    routers = router_places(UpConfig(routers=3, port=ports[0], admin_port=ports[3], host="0.0.0.0"))
    assert [(r.name, r.port, r.admin_port) for r in routers] == [
        ("router-0", ports[0], ports[3]),
        ("router-1", ports[1], ports[4]),
        ("router-2", ports[2], ports[5]),
    ]
    assert routers[1].url == f"http://127.0.0.1:{ports[1]}"
    assert routers[1].admin_url == f"http://127.0.0.1:{ports[4]}"


def test_any_free_ports_are_all_different() -> None:
    routers = router_places(UpConfig(routers=16, port=0))
    assert len({r.port for r in routers} | {r.admin_port for r in routers}) == 32


def test_port_that_is_taken_is_named_with_its_router(ports_in_a_row: Ports) -> None:
    ports = ports_in_a_row(3)
    with socket.create_server(("127.0.0.1", ports[2])):
        with pytest.raises(ConfigError, match=f"^router-2: cannot listen on 127.0.0.1:{ports[2]}: .*another --port$"):
            router_places(UpConfig(routers=3, port=ports[0]))
        with pytest.raises(ConfigError, match=f"^router-1: cannot listen .*:{ports[2]}: .*another --admin-port$"):
            router_places(UpConfig(routers=2, port=0, admin_port=ports[1]))
        with pytest.raises(ConfigError, match=r"^cannot listen on"):
            router_places(UpConfig(port=ports[2]))


def test_admin_ports_among_the_routers_ports_are_refused(ports_in_a_row: Ports) -> None:
    ports = ports_in_a_row(2)
    with pytest.raises(ConfigError, match=f"^router-0: cannot listen on 127.0.0.1:{ports[1]}: .* --admin-port$"):
        router_places(UpConfig(routers=2, port=ports[0], admin_port=ports[1]))


@pytest.mark.parametrize("option", ["port", "admin_port"])
def test_ports_end(option: str) -> None:
    flags = {"routers": "8", "port": "0", option: "65530"}
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} 65530 leaves no port for router-6"):
        router_places(resolve(UpConfig, flags=flags, environ={}, file=None).config)


@pytest.mark.parametrize("count", [-1, 0, 65])
def test_no_router_and_too_many_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="routers must be at"):
        UpConfig(routers=count)
