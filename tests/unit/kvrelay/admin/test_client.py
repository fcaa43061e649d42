"""How `kvrelay admin` finds a cluster and a node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.certificates import made

from common.base.errors import ConfigError
from common.base.process import start_ticks
from common.cluster.running_clusters import RunningCluster, announced, running_clusters, runtime_folder
from common.control.admin_server import AdminRoute, AdminServer
from common.security.tls import Credentials
from kvrelay.admin.client import (
    AdminClient,
    AdminRefused,
    AdminUnreachable,
    AdminUsage,
    connect,
    pick_node,
    router_urls,
)
from router.admin_http import admin_http


class _Answers(BaseHTTPRequestHandler):
    answer: tuple[int, bytes] = (200, b"{}")

    def do_GET(self) -> None:
        status, body = self.answer
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def admin_port() -> Iterator[str]:
    """The URL of a server that answers every GET with an empty object."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def known(node_id: str, incarnation: str, *, usable: bool = True) -> dict[str, Any]:
    return {"node_id": node_id, "incarnation": incarnation, "usable": usable}


NODES = [known("decode-0", "aa1"), known("decode-1", "ab2"), known("decode-10", "cc3"), known("prefill-0", "dd4")]


def test_node_is_found_by_id_incarnation_or_prefix() -> None:
    for name, node_id in (("decode-1", "decode-1"), ("p", "prefill-0"), ("aa", "decode-0"), ("cc3", "decode-10")):
        assert pick_node(NODES, name)["node_id"] == node_id


def test_ambiguous_and_unknown_nodes_are_refused_with_the_known_ones_listed() -> None:
    with pytest.raises(AdminRefused, match="decode-0, decode-1, decode-10"):
        pick_node(NODES, "dec")
    with pytest.raises(AdminRefused, match="known: decode-0"):
        pick_node(NODES, "x")
    with pytest.raises(AdminUsage, match="empty"):
        pick_node(NODES[:1], "")
    with pytest.raises(AdminRefused, match="known: none"):
        pick_node([], "x")


def test_the_usable_one_of_two_incarnations_of_a_node_is_chosen() -> None:
    twice = [known("d", "new"), known("d", "old", usable=False)]
    assert pick_node(twice, "d")["incarnation"] == "new"
    assert pick_node(twice[::-1], "d")["incarnation"] == "new"
    assert pick_node(twice, "old")["incarnation"] == "old"


def test_token_goes_to_a_nodes_loopback_only_from_its_own_host() -> None:
    node = {**known("d", "i"), "admin_address": "http://127.0.0.1:7", "control_address": "tcp://127.0.0.1:8"}
    assert AdminClient("http://localhost:1", "t").address_of(node) == "http://127.0.0.1:7"
    with pytest.raises(AdminRefused, match="--admin-host"):
        AdminClient("http://10.0.0.5:1", "t").address_of(node)
    for elsewhere in ("tcp://192.0.2.7:8", "tcp://[2001:db8::7]:8", "tcp://no-such-host.invalid:8"):
        with pytest.raises(AdminRefused, match="--admin-host"):
            AdminClient("http://localhost:1", "t").address_of({**node, "control_address": elsewhere})
    far = {**node, "admin_address": "http://10.0.0.6:7"}
    assert AdminClient("http://10.0.0.5:1", "t").address_of(far) == "http://10.0.0.6:7"
    with pytest.raises(AdminRefused, match="--admin-token"):
        AdminClient("http://localhost:1", "t").address_of({**node, "admin_address": ""})


@pytest.mark.parametrize("unset", ["", "none"])
def test_a_folder_of_certificates_that_is_not_set_is_none(unset: str) -> None:
    connect("http://127.0.0.1:1", {"KVRELAY_ADMIN_TOKEN": "t", "KVRELAY_TLS_DIR": unset})
    with pytest.raises(ConfigError, match="certificates in nowhere"):
        connect("http://127.0.0.1:1", {"KVRELAY_ADMIN_TOKEN": "t", "KVRELAY_TLS_DIR": "nowhere"})


URL, ADMIN_URL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


CLUSTER = RunningCluster(os.getpid(), {URL: ADMIN_URL}, "hush", start_ticks(os.getpid()))


def test_a_nodes_address_that_is_no_url_of_an_admin_port_is_not_opened(tmp_path: Path) -> None:
    file = tmp_path / "status"
    file.write_text("{}")
    with pytest.raises(AdminUnreachable, match="is not the URL"):
        AdminClient("http://localhost:1", "t").get("/status", base=f"file://{tmp_path}")


def test_running_cluster_is_found_and_removed_at_its_end(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with announced(CLUSTER, runtime_folder(environ)):
        assert running_clusters(runtime_folder(environ)) == [CLUSTER]
        client = connect(None, environ)
        assert client.url == ADMIN_URL
        assert connect(URL, environ).url == ADMIN_URL
        [file] = (tmp_path / "kvrelay").iterdir()
        assert file.stat().st_mode & 0o077 == 0
    assert list((tmp_path / "kvrelay").iterdir()) == []
    with pytest.raises(AdminUnreachable, match="no `kvrelay up`"):
        connect(None, environ)


def test_the_named_router_is_asked_else_the_first_that_answers(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as ended, admin_port() as alive:
        first = f"http://127.0.0.1:{ended.getsockname()[1]}"
        routers = {"http://127.0.0.1:0": first, "http://127.0.0.1:1": alive}
        ended.close()
        with announced(RunningCluster(os.getpid(), routers, "hush"), runtime_folder(environ)):
            assert connect(None, environ).url == alive
            assert connect("http://127.0.0.1:0/", environ).url == connect(first, environ).url == first
            assert connect("http://127.0.0.1:1", environ).url == connect(alive, environ).url == alive


def test_routers_of_several_hosts_are_all_named_and_the_first_that_answers_is_asked(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "KVRELAY_ADMIN_TOKEN": "hush"}
    with socket.create_server(("127.0.0.1", 0)) as ended, admin_port() as alive:
        gone = f"http://127.0.0.1:{ended.getsockname()[1]}"
        ended.close()
        both = f"{gone}/, {alive}"
        assert connect(both, environ).url == alive
        assert router_urls(both, environ) == ([gone, alive], "hush")
        with announced(RunningCluster(os.getpid(), {URL: ADMIN_URL}, "own"), runtime_folder(environ)):
            assert router_urls(f"{alive},{URL}", environ) == ([ADMIN_URL, alive], "hush")
            del environ["KVRELAY_ADMIN_TOKEN"]
            with pytest.raises(
                AdminUsage, match=f"no `kvrelay up` of this user is at {alive}: set KVRELAY_ADMIN_TOKEN"
            ):
                connect(f"{URL},{alive}", environ)
    with pytest.raises(AdminUsage, match="'' is not a URL"):
        connect(f"{alive},", environ)


def test_a_service_that_accepts_and_says_nothing_is_given_up_within_the_budget_of_all_questions() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AdminClient(f"http://127.0.0.1:{silent.getsockname()[1]}", "t", budget_s=0.1)
        for _ in range(2):
            with pytest.raises(AdminUnreachable, match=r"does not answer: nothing within 0.1 s"):
                client.get("/status")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ({"code": "not_found", "message": "no request"}, "no request$"),
        ({"code": "not_found", "message": "no /nodes", "type": "invalid_request_error"}, "404: is that an admin port"),
        ("of another server", "404: is that an admin port"),
    ],
)
def test_a_refusal_gives_the_services_reason_and_that_of_the_api_asks_for_the_admin_port(
    monkeypatch: pytest.MonkeyPatch, error: object, says: str
) -> None:
    monkeypatch.setattr(_Answers, "answer", (404, json.dumps({"error": error}).encode()))
    with admin_port() as url, pytest.raises(AdminRefused, match=says):
        AdminClient(url, "t").get("/nodes")


def test_nodes_are_asked_at_once_and_the_errors_of_some_leave_the_answers_of_the_others() -> None:
    with admin_port() as alive:
        client = AdminClient(alive, "t")
        here = "tcp://127.0.0.1:8"
        nodes = [
            {"node_id": name, "admin_address": url, "control_address": here} for name, url in (("a", alive), ("b", ""))
        ]
        answers, failed = client.of_each(nodes, lambda base: client.get("/status", base=base))
    assert answers == {"a": {}}
    assert "--admin-token" in failed["b"].message


def test_several_clusters_need_a_url_and_dead_ones_do_not_count(tmp_path: Path) -> None:
    folder = runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)})
    folder.mkdir(mode=0o700)
    parent = {"pid": os.getppid(), "started_ticks": start_ticks(os.getppid())}
    other = {**vars(CLUSTER), **parent, "routers": {"http://127.0.0.1:9000": "http://127.0.0.1:9001"}}
    (folder / "up-2.json").write_text(json.dumps(other))
    (folder / "up-3.json").write_text(json.dumps({**vars(CLUSTER), "pid": 2**22 + 1}))
    (folder / "up-4.json").write_text("{")
    (folder / "up-5.json").write_text(json.dumps({**other, "started_ticks": 1}))  # a later process has its id
    with announced(CLUSTER, folder):
        assert not (folder / "up-3.json").exists()
        assert not (folder / "up-5.json").exists()
        with pytest.raises(AdminUsage, match=r"--url http://127.0.0.1:(8000|9000)`") as caught:
            connect(None, {"XDG_RUNTIME_DIR": str(tmp_path)})
        assert f"http://127.0.0.1:8000 (pid {os.getpid()})" in str(caught.value)


@pytest.mark.parametrize(("variables", "token"), [({}, "hush"), ({"KVRELAY_ADMIN_TOKEN": "given"}, "given")])
def test_a_cluster_of_this_user_is_asked_at_its_admin_port_whichever_address_is_given(
    variables: dict[str, str], token: str, tmp_path: Path
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), **variables}
    with announced(CLUSTER, runtime_folder(environ)):
        for url in (None, URL, ADMIN_URL, "http://localhost:8000", "http://localhost:8001/"):
            client = connect(url, environ)
            assert (client.url, client.token) == (ADMIN_URL, token)
        if variables:
            assert connect("http://10.0.0.5:8000", environ).url == "http://10.0.0.5:8000"


def test_folder_that_others_can_read_is_neither_written_nor_read(tmp_path: Path) -> None:
    folder = tmp_path / "kvrelay"
    folder.mkdir()
    folder.chmod(0o755)
    with announced(CLUSTER, folder):
        assert list(folder.iterdir()) == []
    (folder / "up-1.json").write_text(json.dumps(vars(CLUSTER)))
    assert running_clusters(folder) == []


def test_url_without_a_token_is_a_usage_error(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(AdminUsage, match="KVRELAY_ADMIN_TOKEN"):
        connect("http://10.0.0.5:8001", environ)
    for wrong in ("10.0.0.5:8001", "http://[::1:8001", "http://:8001", "http://10.0.0.5:99999", "http://10.0.0.5:x"):
        with pytest.raises(AdminUsage, match="is not a URL"):
            connect(wrong, environ)
    assert connect("http://10.0.0.5:8001/", {**environ, "KVRELAY_ADMIN_TOKEN": "t"}).url == "http://10.0.0.5:8001"


def test_token_that_is_not_valid_in_a_header_is_a_usage_error_that_does_not_show_it(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "KVRELAY_ADMIN_TOKEN": "hidden\n"}
    with pytest.raises(AdminUsage, match="line end") as caught:
        connect("http://10.0.0.5:8001", environ)
    assert "hidden" not in str(caught.value)


async def asked(shown: str, own: str | None) -> object:
    """What the admin port of a service with the certificate `shown` answers `kvrelay admin`."""
    server = AdminServer("0.0.0.0", 0, "token", Credentials(str(made() / shown)))
    server.start([AdminRoute("GET", "/status", lambda _: {"a": 1})])
    url = f"https://127.0.0.1:{server.port}"
    client = AdminClient(url, "token", tls_dir=None if own is None else str(made() / own))
    try:
        return await asyncio.to_thread(client.get, "/status")
    finally:
        await server.close()


@pytest.mark.parametrize("shown", ["node", "router"])
def test_kvrelay_admin_asks_a_service_of_its_authority(shown: str) -> None:
    assert asyncio.run(asked(shown, "admin")) == {"a": 1}


@pytest.mark.parametrize(
    ("shown", "own"),
    [("stranger", "admin"), ("revoked", "admin"), ("admin", "admin"), ("node", None), ("node", "stranger")],
)
def test_kvrelay_admin_asks_nobody_else(shown: str, own: str | None) -> None:
    with pytest.raises(AdminUnreachable):
        asyncio.run(asked(shown, own))


def test_certificates_that_cannot_be_read_are_reported() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        AdminClient("https://127.0.0.1:1", "token", tls_dir="/no/such")


async def asked_by_router(shown: str) -> int:
    server = AdminServer("0.0.0.0", 0, "token", Credentials(str(made() / shown)))
    server.start([AdminRoute("GET", "/status", lambda _: {"a": 1})])
    try:
        async with admin_http("token", 5, str(made() / "router")) as http:
            return (await http.get(f"https://127.0.0.1:{server.port}/status")).status_code
    finally:
        await server.close()


def test_a_router_asks_nodes_only() -> None:
    assert asyncio.run(asked_by_router("node")) == 200
    for other in ("router", "stranger", "revoked"):
        with pytest.raises(httpx.ConnectError):
            asyncio.run(asked_by_router(other))


def test_an_admin_port_on_loopback_is_plain_http() -> None:
    async def url() -> str:
        server = AdminServer("127.0.0.1", 0, "token", Credentials(str(made() / "node")))
        await server.close()
        return server.url

    assert asyncio.run(url()).startswith("http://127.0.0.1:")
