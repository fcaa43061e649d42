"""A cluster of two protocol versions: half of the services run the commit before the last change of the protocol.

`kvrelay admin roll` replaces every service, old ones by new ones and new ones by old ones, while clients stream.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import httpx
import pytest
from support.paths import ROOT
from support.redis_server import RedisServer
from support.retrying_clients import Clients, body, stream
from support.system import wait_until
from support.two_versions import Place, Service, older_tree, spoken_at, supervised
from typer.testing import CliRunner

from common.control.versions import OLDEST_VERSION, PROTOCOL_VERSION
from common.model.hub import DEMO_MODEL_PATH
from kvrelay.admin.cli import app as admin

pytestmark = pytest.mark.thorough

STREAMS = 16
START_S = 180.0


@pytest.mark.timeout(600)
def test_services_of_two_versions_serve_together_and_replace_each_other_under_load(
    tmp_path: Path, redis_server: RedisServer, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = older_tree(tmp_path / "older"), ROOT
    monkeypatch.setenv("KVRELAY_ADMIN_TOKEN", secrets.token_hex(16))
    everybody = ["--redis-url", redis_server.url, "--cluster", cluster, "--lease-s", "5"]
    node = [
        *everybody,
        "--model",
        str(DEMO_MODEL_PATH),
        "--served-model-name",
        "demo",
        "--dtype",
        "float32",
        "--kv-blocks",
        "1200",
        "--threads",
        "1",
    ]
    router = [*everybody, "--policy", "round_robin", "--local-prefill-tokens", "0"]
    roles = {"decode": [*node, "--pp", "2"], "prefill": [*node, "--tp", "2"], "router": router}
    places, services = dict[str, Place](), dict[str, Service]()
    for role, options in roles.items():
        for index, tree in enumerate((old, new)):
            name, place = f"{role}-{index}", Place()
            ports = ["--port", str(place.port), "--admin-port", str(place.admin_port)]
            own = [] if role == "router" else ["--node-id", name]
            places[name] = place
            services[name] = Service([role, *options, *ports, *own], tree, tmp_path / f"{name}.log")
    routers = [places["router-0"], places["router-1"]]
    nodes = [name for name in places if not name.startswith("router")]

    def versions() -> dict[str, int]:
        return {name: spoken_at(places[name].url) for name in nodes}

    with supervised(services, (old, new)):
        for place in routers:
            wait_until(lambda place=place: usable(place) == (2, 2), START_S, "all nodes usable", lambda: logs(tmp_path))
        before = dict.fromkeys(("decode-0", "prefill-0"), OLDEST_VERSION)
        before |= dict.fromkeys(("decode-1", "prefill-1"), PROTOCOL_VERSION)
        assert versions() == before
        urls = [place.url for place in routers]
        expected = {index: stream(urls[0], body(index)) for index in range(STREAMS)}
        assert expected == {index: stream(urls[1], body(index)) for index in range(STREAMS)}
        clients = Clients(urls, expected, STREAMS)
        try:
            for _ in range(2):  # the second brings each service back to the version that it began with
                before = versions()
                admin_urls = ",".join(place.admin_url for place in routers)
                roll = ["roll", "--url", admin_urls, "--timeout", "60", "--json"]
                result = CliRunner().invoke(admin, roll)
                assert result.exit_code == 0, result.stderr + logs(tmp_path)
                assert {name: OLDEST_VERSION + PROTOCOL_VERSION - was for name, was in before.items()} == versions()
            for place in routers:  # the one that was started again last has relayed nothing at first
                wait_until(lambda place=place: relayed_bytes(place) > 0, START_S, "a relay through each router")
        finally:
            clients.stop()
        assert clients.wrong == []
        assert clients.answered > 4 * STREAMS
        assert all(len(service.starts) == 3 for service in services.values())
    said = logs(tmp_path)
    for complaint in ("protocol version", "dropped control message", "malformed", "Traceback"):
        assert complaint not in said, said


def usable(router: Place) -> tuple[int, int] | None:
    try:
        health = httpx.get(f"{router.url}/health", timeout=5.0, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return None
    return health.get("prefill"), health.get("decode")


def relayed_bytes(router: Place) -> float:
    said = httpx.get(f"{router.url}/metrics", timeout=5.0, trust_env=False).text
    [line] = [each for each in said.splitlines() if each.startswith("kvrelay_relayed_bytes_total")]
    return float(line.rsplit(" ", 1)[1])


def logs(folder: Path) -> str:
    return "\n".join(f"--- {each.name}\n{each.read_text(errors='replace')}" for each in sorted(folder.glob("*.log")))
