"""The image and the compose files in a real Docker engine: up, chat, a container dies, it comes back, down.

The first build takes minutes; later ones find their layers in the engine's cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.docker_engine import BASE_IMAGE, IMAGE, Project, build_image, project, run, why_not
from support.oracle import first_difference, greedy, make_tiny
from support.paths import ROOT
from support.ports import free_port
from support.retrying_clients import CLIENTS, Clients, body, stream
from support.system import wait_until
from typer.testing import CliRunner

from kvrelay.keys.cli import app as keys_app

REASON = why_not()
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(REASON is not None, reason=f"compose: {REASON}"),
    pytest.mark.timeout(1200),
]

QUESTION = (
    "Hello! I would like to know what the capital of France is. Can you please tell me? What is the capital of France?"
)
DEMO = {
    "IMAGE": IMAGE,
    "BASE_IMAGE": BASE_IMAGE,
    "HEALTH_INTERVAL": "2s",
    "KVRELAY_KV_MEMORY_GB": "0.1",
    "KVRELAY_LOCAL_PREFILL_TOKENS": "0",  # every prompt is relayed, whatever is cheaper
}


@pytest.fixture(scope="module")
def compose_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compose files beside which `.env` files may be written; the image is built."""
    return build_image(tmp_path_factory.mktemp("image"))


def chat(port: int) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=30.0, trust_env=False)


def health(port: int) -> dict[str, object]:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0, trust_env=False).json()
    except httpx.TransportError:
        return {}


@contextlib.contextmanager
def one_host(
    compose_folder: Path, *added: str, up: tuple[str, ...] = (), **settings: str
) -> Iterator[tuple[Project, int]]:
    """Everything on one host, as it comes but for the port, the files `added` and `settings`."""
    port = free_port()
    name = f"kvtest{secrets.token_hex(3)}"
    files = tuple(compose_folder / file for file in ("compose.yaml", *added))
    with project(name, files, {**DEMO, **settings, "HTTP_PORT": str(port)}, *up) as running:
        running.wait_healthy("redis", "prefill", "decode", "router")
        yield running, port


def check_chat(port: int) -> str:
    """Send a request that is relayed. Returns the answer's text."""
    answer = chat(port)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvrelay-prefill-mode"] == "relayed"
    text = answer.json()["choices"][0]["message"]["content"]
    assert text
    return text


def test_one_host_chats_and_dead_services_come_back(compose_folder: Path) -> None:
    with one_host(compose_folder) as (running, port):
        history = running.history()
        for first, then in (("redis", "prefill"), ("redis", "decode"), ("prefill", "router"), ("decode", "router")):
            assert history.index(f"health_status: healthy {first}") < history.index(f"start {then}")
        text = check_chat(port)
        for service in ("decode", "prefill", "router"):
            assert run("docker", "exec", running.container(service), "id", "-u").strip() == "10001"
            running.crash(service)
            wait_until(lambda service=service: running.restarts(service) >= 1, 30, f"{service} is restarted")
        running.wait_healthy("prefill", "decode", "router")
        wait_until(lambda: (health(port).get("prefill"), health(port).get("decode")) == (1, 1), 30, "both are usable")
        assert check_chat(port) == text


def test_nodes_of_several_ranks_chat_and_stop_in_order(compose_folder: Path) -> None:
    with one_host(compose_folder, "compose.tp-pp.yaml") as (running, port):
        check_chat(port)
        containers = {service: running.container(service) for service in ("router", "prefill", "decode")}
        running.compose("stop")
        codes = {name: run("docker", "inspect", "-f", "{{.State.ExitCode}}", id_) for name, id_ in containers.items()}
        assert {name: code.strip() for name, code in codes.items()} == dict.fromkeys(containers, "0")


def test_three_prefill_nodes_chat_over_mutual_tls_and_options_reach_the_router(compose_folder: Path) -> None:
    scaled = ("--scale", "prefill=3")
    with one_host(compose_folder, "compose.tls.yaml", up=scaled, KVRELAY_POLICY="round_robin") as (running, port):
        wait_until(lambda: (health(port).get("prefill"), health(port).get("decode")) == (3, 1), 60, "all are usable")
        check_chat(port)
        assert len(running.containers("prefill")) == 3
        assert "KVRELAY_POLICY=round_robin" in running.inspect("router", "{{.Config.Env}}")
        plain = "from common.node.healthcheck import main; raise SystemExit(main(['tcp://127.0.0.1:7001']))"
        asked = ("docker", "exec", "-e", "KVRELAY_TLS_DIR=", running.container("decode"), "python", "-c", plain)
        with pytest.raises(AssertionError, match="exit code 1"):
            run(*asked)
        seen = run("docker", "exec", running.container("router"), "sh", "-c", "ls /keys/*/*.pem")
        assert set(seen.split()) == {f"/keys/router/{name}.pem" for name in ("ca", "cert", "key", "crl")}


def test_a_rolling_restart_of_every_service_fails_no_request(compose_folder: Path) -> None:
    port = free_port()
    scaled = [word for role in ("prefill", "decode", "router") for word in ("--scale", f"{role}=2")]
    settings = {**DEMO, "HTTP_PORT": f"{port}-{port + 1}", "KVRELAY_ADMIN_TOKEN": "hush"}
    with project(f"kvtest{secrets.token_hex(3)}", (compose_folder / "compose.yaml",), settings, *scaled) as running:
        running.wait_healthy("redis", "prefill", "decode", "router")
        urls = [f"http://127.0.0.1:{port + number}" for number in range(2)]
        for number in range(2):
            wait_until(lambda number=number: health(port + number).get("decode") == 2, 30, "all are usable")
        clients = Clients(urls, {index: stream(urls[0], body(index)) for index in range(CLIENTS)})
        try:
            command = (
                "run",
                "--rm",
                "--no-deps",
                "-T",
                "router",
                "admin",
                "roll",
                "--url",
                "http://router:8001",
                "--json",
            )
            rows = json.loads(running.compose(*command))
        finally:
            clients.stop()
        assert clients.wrong == []
        assert clients.answered > CLIENTS
        assert [row["role"] for row in rows] == ["decode", "decode", "prefill", "prefill", "router", "router"]
        for service in ("decode", "prefill", "router"):
            for container in running.containers(service):
                assert run("docker", "inspect", "-f", "{{.RestartCount}}", container).strip() == "1"


@pytest.mark.parametrize("encryption", [(), ("compose.tls.yaml", "compose.models.tls.yaml")])
def test_a_second_model_is_served_beside_the_first(
    compose_folder: Path, tmp_path: Path, encryption: tuple[str, ...]
) -> None:
    make_tiny("qwen2", tmp_path / "models" / "qwen2")
    readable(tmp_path)
    settings = {"MODELS_DIR": str(tmp_path / "models"), "SECOND_MODEL": "/models/qwen2"}
    with one_host(compose_folder, "compose.models.yaml", *encryption, **settings) as (running, port):
        running.wait_healthy("prefill-second", "decode-second")
        check_chat(port)
        url = f"http://127.0.0.1:{port}/v1"
        wait_until(lambda: len(httpx.get(f"{url}/models", trust_env=False).json()["data"]) == 2, 30, "both are listed")
        body = {"model": "qwen2", "prompt": list(range(5, 60)), "max_tokens": 4}
        answer = httpx.post(f"{url}/completions", json=body, timeout=60.0, trust_env=False)
        assert answer.status_code == 200, answer.text


def test_the_image_is_small_and_lists_what_is_in_it(compose_folder: Path) -> None:
    assert int(run("docker", "image", "inspect", "-f", "{{.Size}}", IMAGE)) < 1.2e9
    cat = ("docker", "run", "--rm", "--entrypoint", "cat", IMAGE)
    components = json.loads(run(*cat, "/usr/share/kvrelay/sbom.cdx.json"))["components"]
    versions = {component["name"].lower(): component["version"].partition("+")[0] for component in components}
    lines = (ROOT / "requirements.lock").read_text("utf-8").splitlines()
    locked = dict(line.split("==") for line in lines if "==" in line)
    assert versions["torch"] == locked["torch"]
    differing = {name for name, version in versions.items() if locked.get(name, version) != version}
    assert not differing
    assert not any(name.startswith("nvidia-") for name in versions)
    assert "libc6" in run(*cat, "/usr/share/kvrelay/debian.txt")


def readable(folder: Path) -> None:
    """Let the container's user read all files below `folder`."""
    for path, _, files in os.walk(folder):
        for name in [path, *(os.path.join(path, file) for file in files)]:
            os.chmod(name, 0o755 if os.path.isdir(name) else 0o644)


@pytest.fixture
def address() -> Iterator[str]:
    """An address of this machine that every container can reach: the gateway of an otherwise empty network."""
    name = f"kvtest{secrets.token_hex(3)}"
    run("docker", "network", "create", name)
    try:
        yield run("docker", "network", "inspect", name, "-f", "{{(index .IPAM.Config 0).Gateway}}").strip()
    finally:
        run("docker", "network", "rm", name)


@pytest.mark.parametrize("added", [(), ("compose.multi-host.tls.yaml",)])
def test_every_role_on_a_host_of_its_own_with_exact_tokens(
    compose_folder: Path, tmp_path: Path, address: str, added: tuple[str, ...]
) -> None:
    """Three projects stand for three hosts: each has a network of its own, and they reach each other by published ports only."""
    model = make_tiny("qwen2", tmp_path / "models" / "qwen2")
    assert CliRunner().invoke(keys_app, ["init", str(tmp_path / "keys")]).exit_code == 0
    readable(tmp_path)
    tag = secrets.token_hex(3)
    names = ("REDIS_PORT", "PREFILL_PORT", "DECODE_PORT", "DECODE_DATA_PORT", "HTTP_PORT")
    ports = {name: str(free_port()) for name in names}
    shared = {
        **DEMO,
        **ports,
        "HOST_ADDRESS": address,
        "REDIS_HOST": address,
        "REDIS_PASSWORD": secrets.token_hex(8),
        "MODELS_DIR": str(tmp_path / "models"),
        "KEYS_DIR": str(tmp_path / "keys"),
        "KVRELAY_MODEL": "/models/qwen2",
        "KVRELAY_DTYPE": "float32",
    }
    files = tuple(compose_folder / file for file in ("compose.multi-host.yaml", *added))
    with contextlib.ExitStack() as stack:

        def host(name: str, roles: str) -> Project:
            settings = {**shared, "COMPOSE_PROFILES": roles}
            return stack.enter_context(project(f"kvtest{tag}{name}", files, settings))

        # The decode node comes before Redis: it ends, and is started again until Redis is there.
        decode = host("d", "decode")
        front = host("f", "redis,router")
        prefill = host("p", "prefill")
        front.wait_healthy("redis")
        prefill.wait_healthy("prefill")
        decode.wait_healthy("decode")
        front.wait_healthy("router")
        port = int(ports["HTTP_PORT"])
        wait_until(lambda: (health(port).get("prefill"), health(port).get("decode")) == (1, 1), 60, "both are usable")
        prompt = [3 + (7 * i) % 290 for i in range(200)]
        body = {"model": "qwen2", "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={**body, "return_token_ids": True},
            timeout=60.0,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvrelay-prefill-mode"] == "relayed"
        assert first_difference(greedy(model, prompt, 32), answer.json()["choices"][0]["token_ids"]) is None
