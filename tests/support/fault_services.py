"""The services of the fault matrix's system, each with its host and command."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from support import warm_start
from support.network_hosts import Host, Network
from support.ports import free_port

from common.cluster.redis_server import find_redis_binary
from common.security.certificates import Authority

LEASE_S = 3.0
CLUSTER = "faults"

HOSTS = ("redis", "router-0", "router-1", "prefill-0", "prefill-1", "pre-1b", "decode-0", "decode-1", "dec-1b")
"""`pre-1b` and `dec-1b` are the hosts of the second rank of `pre-1` and `dec-1`."""
RANK_HOSTS = {"prefill-1": "pre-1b", "decode-1": "dec-1b"}
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ROUTERS = ("router-0", "router-1")
TLS = os.environ.get("FAULT_TLS") == "1"
"""Whether the services know each other by certificates."""

SPECULATE = os.environ.get("FAULT_SPECULATE", "suffix")
"""How one of the decode nodes guesses; `draft:MODEL`: the model is its own draft."""


@dataclass
class Service:
    """One service that the test started, through all restarts of its process."""

    name: str
    command: list[str]
    host: Host | None
    log_file: Path
    process: warm_start.Process | None = None

    def start(self, env: dict[str, str]) -> None:
        assert not self.alive
        with self.log_file.open("ab") as log:
            self.process = warm_start.start(self.command, log, env, self.host)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


@dataclass
class Layout:
    """Addresses, ports and commands of all services."""

    commands: dict[str, list[str]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    """Port of each node's control socket."""
    urls: dict[str, str] = field(default_factory=dict)
    """Of each router."""
    redis_url: str = ""
    tls_dir: Path | None = None
    """Certificates with which the test itself asks nodes."""


def lay_out(folder: Path, model: Path, network: Network | None) -> Layout:
    """All services, each on its own host if there is a network."""
    made = Layout()

    def at(name: str) -> str:
        return "127.0.0.1" if network is None else network.hosts[name].address

    def port(own: int) -> int:
        return free_port() if network is None else own

    kvrelay = [sys.executable, "-m", "kvrelay"]
    redis_port = port(6379)
    made.redis_url = f"redis://{at('redis')}:{redis_port}/0"
    redis_args = ["--bind", at("redis"), "--port", str(redis_port), "--protected-mode", "no", "--save", ""]
    commands = made.commands = {"redis": [find_redis_binary(), *redis_args, "--dir", str(folder)]}
    everybody = ["--redis-url", made.redis_url, "--cluster", CLUSTER, "--lease-s", str(LEASE_S)]
    node = [*everybody, "--model", str(model), "--dtype", "float32", "--kv-blocks", "1400", "--threads", "1"]
    sizes = {
        "prefill": ["--max-num-seqs", "5", "--max-num-batched-tokens", "96"],
        "decode": ["--max-num-seqs", "16"],
    }
    for name in NODES:
        role, index = name.split("-")
        own = [*kvrelay, role, *node, *sizes[role], "--node-id", name]
        control = port(5000)
        made.addresses[name] = f"tcp://{at(name)}:{control}"
        if name == "decode-1":  # the other one does not guess: streams that move between them stay the same
            own += ["--speculate", SPECULATE.replace("MODEL", str(model))]
        ranked = [] if index == "0" else ["--tp" if role == "prefill" else "--pp", "2"]
        commands[name] = [*own, *ranked, "--host", at(name), "--port", str(control)]
        if ranked and network is not None:
            spread = ["--nnodes", "2", "--master-addr", at(name), "--master-port", "5900"]
            commands[name] += [*spread, "--node-rank", "0"]
            commands[RANK_HOSTS[name]] = [*own, *ranked, "--host", at(RANK_HOSTS[name]), *spread, "--node-rank", "1"]
    for name in ROUTERS:
        http = port(8000)
        made.urls[name] = f"http://{at(name)}:{http}"
        commands[name] = [*kvrelay, "router", "--host", at(name), "--port", str(http), *everybody]
        # least_load, so that every node has streams to lose: kv_aware may find the node with two stages too slow to use.
        commands[name] += ["--local-prefill-tokens", "0", "--policy", "least_load"]
    if TLS:
        _add_certificates(made, folder / "keys")
    return made


def _add_certificates(made: Layout, keys: Path) -> None:
    """A certificate for each router and node; ranks on two hosts share theirs, and reduce over gloo, which stays in clear."""
    authority = Authority.create(keys / "ca")
    for name in (*NODES, *ROUTERS, "test"):
        authority.issue(name, "node" if name in NODES else "router", keys / name, 1)
    for name, command in made.commands.items():
        if name != "redis":
            owner = next((node for node, rank in RANK_HOSTS.items() if rank == name), name)
            command += ["--tls-dir", str(keys / owner)]
            command += ["--allow-plain-collectives"] if owner in RANK_HOSTS else []
    made.tls_dir = keys / "test"
