"""The system of the fault matrix: two routers, two prefill nodes and two decode nodes; one node of each role has two ranks.

If network namespaces are available, every process has its own host (also the two ranks of a node), so that any of them
can be cut off; otherwise all share the loopback. The test supervises the processes: `heal` ends every fault, restarts
dead processes and returns when both routers see all nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import redis
from support.fault_services import CLUSTER, NODES, RANK_HOSTS, ROUTERS, Service, lay_out
from support.network_hosts import Host, Network
from support.system import ranks_of, wait_until

from common.base.errors import ProtocolError
from common.cluster.records import Records
from common.control.codec import check, encode, join, split
from common.control.frames import with_length
from common.control.messages import NodeLoad, Ping, Pong
from common.security.names import host_of
from common.security.tls import Credentials

START_S = 90.0


@dataclass
class FaultSystem:
    """All services by name. Use it inside `fault_system`."""

    folder: Path
    network: Network | None
    services: dict[str, Service] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    """Port of each node's control socket; it stays the same over restarts, as in a container."""
    urls: dict[str, str] = field(default_factory=dict)
    redis_url: str = ""
    credentials: Credentials | None = None
    """With which nodes are asked."""
    _stopped: set[int] = field(default_factory=set)
    _cut: set[str] = field(default_factory=set)
    _slowed: set[str] = field(default_factory=set)
    _incarnations: dict[str, str] = field(default_factory=dict)

    # ------------------------------------------------------------ state

    def incarnation(self, node: str) -> str:
        """The incarnation since the last `heal`."""
        return self._incarnations[node]

    def rank_pid(self, node: str) -> int:
        """The process of rank 1 of a node that has two."""
        starter = self.services[RANK_HOSTS[node]] if RANK_HOSTS[node] in self.services else self.services[node]
        [pid] = ranks_of(starter.pid)
        return pid

    def parts(self, node: str) -> list[Service]:
        """The services that live and die together with `node`."""
        names = [node, RANK_HOSTS.get(node, "")]
        return [self.services[name] for name in names if name in self.services]

    def host(self, name: str) -> Host:
        assert self.network is not None
        return self.network.hosts[name]

    def load(self, node: str, timeout_s: float = 0.5) -> NodeLoad | None:
        """The load that the node reports now; None if it does not answer."""
        pong = self._ask(node, timeout_s)
        return None if pong is None else pong.load

    def _ask(self, node: str, timeout_s: float) -> Pong | None:
        place = urlsplit(self.addresses[node])
        frame = join([encode(Ping("fault-test", lease_s=0.0))])
        try:
            with self._connected(place.hostname or "", place.port or 0, timeout_s) as connection:
                connection.sendall(with_length(frame))
                stream = connection.makefile("rb")
                while True:
                    for message in map(check, split(stream.read(int.from_bytes(stream.read(4), "big")))):
                        if isinstance(message, Pong):
                            return message
        except (OSError, ProtocolError):  # the latter at its end, too: nothing is no frame
            return None

    def _connected(self, host: str, port: int, timeout_s: float) -> socket.socket:
        connection = socket.create_connection((host, port), timeout_s)
        if self.credentials is None:
            return connection
        return self.credentials.for_client().wrap_socket(connection, server_hostname=host_of("node"))

    def incarnations_in_redis(self) -> set[str]:
        """Every incarnation that Redis still knows: in a key's name or in a node's record."""
        found: set[str] = set()
        records = Records(CLUSTER, None if self.credentials is None else self.credentials.folder)
        client: Any = redis.Redis.from_url(self.redis_url, socket_timeout=2, socket_connect_timeout=2)
        try:
            for key in client.scan_iter(count=1000):
                found |= set(re.findall("[0-9a-f]{16}", key.decode()))
                if ":node:" in key.decode() and (record := records.decode(client.get(key))) is not None:
                    found.add(record.peer.incarnation)
        finally:
            client.close()
        return found

    def index_complaint(self) -> str:
        """Differences between the routers' indexes and the blocks of the nodes in Redis; empty if there are none."""
        client: Any = redis.Redis.from_url(self.redis_url, socket_timeout=2, socket_connect_timeout=2)
        try:
            held: set[bytes] = set()
            for key in client.scan_iter(match="*:blocks:*", count=1000):
                held |= client.smembers(key)
        finally:
            client.close()
        for router in ROUTERS:
            known = self.metric(router, "kvrelay_index_blocks")
            if known != len(held):
                return f"{router} knows of {known:.0f} blocks, the nodes hold {len(held)}"
            if self.metric(router, "kvrelay_index_nodes_silent"):
                return f"{router} hears nothing of some node's blocks"
        return ""

    def metrics(self, router: str) -> str:
        return httpx.get(f"{self.urls[router]}/metrics", timeout=5.0, trust_env=False).text

    def metric(self, router: str, name: str, **labels: str) -> float:
        """The sum of the samples of a router's metric that carry `labels`."""
        total = 0.0
        for line in self.metrics(router).splitlines():
            if re.split(r"[{ ]", line, maxsplit=1)[0] == name and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def health(self, router: str) -> dict[str, object]:
        try:
            return httpx.get(f"{self.urls[router]}/health", timeout=2.0, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return {}

    def log_tail(self, lines: int = 25) -> str:
        """The end of every service's log."""
        parts = [
            f"--- {service.name}\n" + "\n".join(service.log_file.read_text(errors="replace").splitlines()[-lines:])
            for service in self.services.values()
        ]
        return "\n".join(parts)

    # ------------------------------------------------------------ faults

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._stopped.add(pid)

    def go_on(self) -> None:
        """Send SIGCONT to all stopped processes."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def cut(self, host: str) -> None:
        """Silently drop all packets to and from this host."""
        assert self.network is not None
        self.network.unplug(host)
        self._cut.add(host)

    def mend(self) -> None:
        for host in self._cut:
            assert self.network is not None
            self.network.plug_in(host)
        self._cut.clear()

    def slow_down(self, mbit_s: dict[str, float]) -> None:
        """Limit the send rate of these hosts, if there are hosts; `heal` removes the limit."""
        if self.network is not None:
            for name, limit in mbit_s.items():
                self.host(name).slow_down(limit)
                self._slowed.add(name)

    # ------------------------------------------------------------ supervision

    def start(self, name: str) -> None:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "KVRELAY_SUPERVISOR_PID": str(os.getpid())}
        self.services[name].start(env)

    def restart_node(self, node: str, within_s: float = 30.0) -> None:
        """Start a node again once all of its processes have ended, which they must do by themselves."""
        self.wait_ended(node, within_s)
        for part in self.parts(node):
            self.start(part.name)

    def wait_ended(self, node: str, within_s: float = 30.0) -> None:
        """Wait until no process of this node is left."""
        wait_until(
            lambda: not any(part.alive for part in self.parts(node)),
            within_s,
            f"all of {node} ended",
            self.log_tail,
        )

    def heal(self, *, ending: tuple[str, ...] = ()) -> None:
        """End all faults and restart dead services; return when everything is as at the beginning.

        `ending`: nodes that are about to end because of a fault; they are started again after that.
        """
        self.go_on()
        self.mend()
        for name in self._slowed:
            self.host(name).slow_down(None)
        self._slowed.clear()
        for node in ending:
            self.wait_ended(node)
        for node in NODES:
            parts = self.parts(node)
            if not all(part.alive for part in parts):
                self.restart_node(node)
        for name in ("redis", *ROUTERS):
            if not self.services[name].alive:
                self.start(name)
        wait_until(self.complete, START_S, "both routers see all nodes", self.log_tail)

    def renew(self) -> None:
        """Restart every node and router."""
        for name in (*NODES, *ROUTERS):
            self.services[name].signal(signal.SIGKILL)
        for name in ROUTERS:
            wait_until(lambda name=name: not self.services[name].alive, 10, f"{name} ended")
        self.heal(ending=NODES)

    def complete(self) -> bool:
        """Whether all nodes are up and both routers use their present incarnations."""
        dead = [service.name for service in self.services.values() if not service.alive]
        assert not dead, f"{dead} ended unasked:\n{self.log_tail()}"
        pongs = {node: self._ask(node, 0.5) for node in NODES}
        if any(pong is None for pong in pongs.values()) or not _answers(self.redis_url):
            return False
        self._incarnations = {node: pong.incarnation for node, pong in pongs.items() if pong is not None}
        known = self.incarnations_in_redis()
        if not set(self._incarnations.values()) <= known:
            return False
        views = [self.health(router) for router in ROUTERS]
        return all(
            (view.get("prefill"), view.get("decode"), view.get("degraded")) == (2, 2, False) for view in views
        ) and all(self._uses_present_nodes(router) for router in ROUTERS)

    def _uses_present_nodes(self, router: str) -> bool:
        usable = re.findall(r'kvrelay_node_usable\{.*node="([^"]+)".*\} 1\.0', self.metrics(router))
        return sorted(usable) == sorted(NODES)

    def wait_whole(self, timeout_s: float = 10.0) -> None:
        """Wait until no node runs or holds anything and both routers' counters are at zero."""

        def trouble() -> str:
            for node in NODES:
                load = self.load(node)
                if load is None:
                    return f"{node} does not answer"
                left = (load.running, load.waiting, load.queued_tokens, load.kv_blocks_used)
                if any(left):
                    return f"{node}: running, waiting, queued tokens, used blocks are {left}"
            for router in ROUTERS:
                for name in (*_ZERO, *_ZERO_BY_NODE):
                    if self.metric(router, name):
                        return f"{router}: {name} is {self.metric(router, name)}"
            return ""

        end = time.monotonic() + timeout_s
        while problem := trouble():
            assert time.monotonic() < end, f"not whole after {timeout_s:.0f} s: {problem}\n{self.log_tail()}"
            time.sleep(0.1)


_ZERO = ("kvrelay_requests_pending", "kvrelay_requests_waiting")
_ZERO_BY_NODE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@contextlib.contextmanager
def fault_system(folder: Path, model: Path, network: Network | None) -> Iterator[FaultSystem]:
    """The running system; at the end it is stopped in order, and nothing may be left.

    `network`: a `Network(*HOSTS)`, or None for the loopback.
    """
    system = FaultSystem(folder, network)
    layout = lay_out(folder, model, network)
    system.addresses, system.urls, system.redis_url = layout.addresses, layout.urls, layout.redis_url
    system.credentials = None if layout.tls_dir is None else Credentials(str(layout.tls_dir))
    for name, command in layout.commands.items():
        host = None if network is None else network.hosts[name]
        system.services[name] = Service(name, command, host, folder / f"{name}.log")
    try:
        system.start("redis")
        wait_until(lambda: _answers(system.redis_url), 30, "Redis answers", system.log_tail)
        for name in system.services:
            if name != "redis":
                system.start(name)
        wait_until(system.complete, START_S, "the whole system is up", system.log_tail)
        yield system
    finally:
        system.go_on()
        system.mend()
        order = sorted(system.services.values(), key=lambda service: _STOP_ORDER[service.name.split("-")[0]])
        for service in order:
            service.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                if service.process is not None:
                    service.process.wait(15)
        late = [service.name for service in order if service.alive]
        for service in order:
            service.signal(signal.SIGKILL)
            if service.process is not None:
                service.process.wait(10)
    assert not late, f"{late} did not end when told to:\n{system.log_tail()}"
    left = [child for child in psutil.Process().children() if str(folder) in " ".join(child.cmdline())]
    assert not left, f"left behind: {left}"


_STOP_ORDER = {"router": 0, "prefill": 1, "pre": 2, "decode": 3, "dec": 4, "redis": 5}


def _answers(redis_url: str) -> bool:
    client = redis.Redis.from_url(redis_url, socket_timeout=1, socket_connect_timeout=1)
    try:
        return bool(client.ping())
    except (redis.RedisError, OSError):
        return False
    finally:
        client.close()
