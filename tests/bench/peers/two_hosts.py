"""The same systems on two hosts with one core each: network namespaces, their processes pinned by `taskset`.

Linux and root only; `why_not` says what is missing. The client, and kvrelay's router, run outside the namespaces and may
use both cores.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from bench.peers.environments import Unavailable
from bench.peers.serving import serving
from bench.peers.systems import MODEL_NAME, Vllm
from bench.worker import child_env
from support import network_hosts
from support.fault_services import Service
from support.network_hosts import Host, Network
from support.system import wait_until

from common.base.endpoints import free_port
from common.cluster.redis_server import find_redis_binary

_NAMES = ("first", "second")
_START_S = 300.0


def why_not() -> str | None:
    """Why the hosts cannot be made here; None if they can."""
    if shutil.which("taskset") is None:
        return "it needs taskset (util-linux)"
    if len(os.sched_getaffinity(0)) < len(_NAMES):
        return "it needs two cores"
    return network_hosts.why_not()


def _pinned(index: int, command: Sequence[str]) -> list[str]:
    core = sorted(os.sched_getaffinity(0))[index]
    return ["taskset", "--cpu-list", str(core), *command]


@contextlib.contextmanager
def kvrelay(checkpoint: Path, roles: Sequence[str], logs: Path) -> Iterator[list[str]]:
    """One node of the given role on each host, and a router for both. Yields its URL."""
    logs.mkdir(parents=True, exist_ok=True)
    with Network(*_NAMES) as network, contextlib.ExitStack() as stack:
        redis_port, port = free_port(), free_port()
        redis_url = f"redis://{network.address}:{redis_port}/0"
        cli = [sys.executable, "-m", "kvrelay"]
        shared = ["--redis-url", redis_url, "--cluster", "peers"]
        redis = ["--bind", network.address, "--port", str(redis_port), "--protected-mode", "no", "--save", ""]
        router = [*cli, "router", "--port", str(port), "--served-model-name", MODEL_NAME, *shared]
        services = [Service("redis", [find_redis_binary(), *redis, "--dir", str(logs)], None, logs / "redis.log")]
        services.append(Service("router", router, None, logs / "router.log"))
        for index, (role, host) in enumerate(zip(roles, network.hosts.values(), strict=True)):
            node = [*cli, role, "--model", str(checkpoint), "--host", host.address, "--port", "5000", *shared]
            services.append(Service(role, _pinned(index, node), host, logs / f"{role}-{index}.log"))
        for service in services:
            stack.callback(_end, service)
            service.start({**os.environ, **child_env()})
        url = f"http://127.0.0.1:{port}"
        wanted = {role: list(roles).count(role) for role in ("prefill", "decode")}
        wait_until(lambda: _usable(url, wanted, services), _START_S, f"{wanted} nodes usable; logs in {logs}")
        yield [url]


def _usable(url: str, wanted: dict[str, int], services: Sequence[Service]) -> bool:
    for service in services:
        if not service.alive:
            raise Unavailable(f"{service.name} ended; see {service.log_file}")
    try:
        health = httpx.get(f"{url}/health", timeout=5.0, trust_env=False).json()
    except httpx.TransportError:
        return False
    return health.get("status") != "unavailable" and {role: health.get(role) for role in wanted} == wanted


def _end(service: Service) -> None:
    if service.process is not None:
        service.process.kill()
        service.process.wait()


@contextlib.contextmanager
def vllm(peer: Vllm, checkpoint: Path, logs: Path) -> Iterator[list[str]]:
    """One server on each host. Yields their URLs."""
    with Network(*_NAMES) as network, contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(_vllm_on(host, index, peer, checkpoint, logs)) for index, host in _numbered(network)
        ]
        yield urls


def _numbered(network: Network) -> list[tuple[int, Host]]:
    return list(enumerate(network.hosts.values()))


@contextlib.contextmanager
def _vllm_on(host: Host, index: int, peer: Vllm, checkpoint: Path, logs: Path) -> Iterator[str]:
    url = f"http://{host.address}:8000"
    command = host.inside(_pinned(index, peer.command(checkpoint, host.address, 8000)))
    with serving(command, peer.env(), url, logs / f"vllm-{index}.log"):
        yield url
