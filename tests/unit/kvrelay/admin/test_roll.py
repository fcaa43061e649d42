from __future__ import annotations

import socket
from typing import Any

import pytest

from kvrelay.admin.client import AdminRefused
from kvrelay.admin.roll import ReachedCluster, Roll, _addresses
from kvrelay.admin.roll_plan import KnownService


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of each host name."""
    known: dict[str, list[str]] = {}

    def resolve(host: str, port: int, family: int, _: int) -> list[Any]:
        found = [each for each in known.get(host, []) if (":" in each) == (family == socket.AF_INET6)]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, 0, 0, "", (each, port)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def test_every_address_of_a_name_is_a_router(names: dict[str, list[str]]) -> None:
    names["router"] = ["10.0.0.2", "10.0.0.1"]
    assert _addresses("http://router:8001") == ["http://10.0.0.1:8001", "http://10.0.0.2:8001"]


def test_so_is_every_one_of_a_network_without_ipv4(names: dict[str, list[str]]) -> None:
    """Only one of several routers was found there, so that the command refused to restart it as the only one."""
    names["router"] = ["fd00::2", "fd00::1"]
    assert _addresses("https://router:8001") == ["https://[fd00::1]:8001", "https://[fd00::2]:8001"]


def test_where_there_are_both_ipv4_counts(names: dict[str, list[str]]) -> None:
    names["localhost"] = ["::1", "127.0.0.1"]
    assert _addresses("http://localhost:8001") == ["http://127.0.0.1:8001"]


def test_a_name_that_is_not_known_is_asked_as_it_is(names: dict[str, list[str]]) -> None:
    assert _addresses("http://nowhere:8001") == ["http://nowhere:8001"]


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["router"], "router-a is the only router. Start another one first, or accept it with --force"),
        (
            [],
            "router-a is the only router. Start another one first, name others to restart these alone, or accept it with",
        ),
    ],
)
def test_who_names_services_is_not_told_to_name_some(
    monkeypatch: pytest.MonkeyPatch, names: list[str], advice: str
) -> None:
    monkeypatch.setenv("KVRELAY_ADMIN_TOKEN", "secret")
    cluster = ReachedCluster("http://127.0.0.1:8001")
    router = KnownService("router", "", "router-a", "router-a", "http://127.0.0.1:8001")
    monkeypatch.setattr(cluster, "routers", lambda: [router])
    monkeypatch.setattr(cluster, "nodes", lambda _: [])
    with pytest.raises(AdminRefused, match=advice):
        Roll(cluster, 1.0, 1.0, 0.0).run(names, force=False)


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        ([("d1", "i2")], "requests would fail: d1 is the only decode node of m"),
        ([("d0", "i1"), ("d1", "i4")], "d1 has ended, or restarted by itself, since this began"),
    ],
)
def test_a_node_that_has_become_the_only_one_or_another_one_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch, left: list[tuple[str, str]], reason: str
) -> None:
    """Restarts of several nodes may take hours, in which another one dies."""

    def decode_nodes(named: list[tuple[str, str]]) -> list[dict[str, Any]]:
        about = {"role": "decode", "model": "m", "usable": True, "admin_address": "http://10.0.0.2:1"}
        return [{**about, "node_id": name, "incarnation": incarnation} for name, incarnation in named]

    monkeypatch.setenv("KVRELAY_ADMIN_TOKEN", "secret")
    cluster = ReachedCluster("http://10.0.0.1:8001")
    seen = [decode_nodes([("d0", "i0"), ("d1", "i2")])] * 2 + [decode_nodes(left)]
    monkeypatch.setattr(cluster, "routers", lambda: [KnownService("router", "", "r", "r", "http://10.0.0.1:8001")])
    monkeypatch.setattr(cluster, "nodes", lambda _: seen.pop(0))
    roll = Roll(cluster, 1.0, 1.0, 0.0)
    restarted: list[str] = []
    monkeypatch.setattr(roll, "_restart", lambda service, *_: restarted.append(service.name))
    with pytest.raises(AdminRefused, match=reason):
        roll.run(["decode"], force=False)
    assert restarted == ["d0"]
