"""Hosts for tests on one machine: network namespaces, each with one interface on a common switch, and network faults.

Linux and root only; `why_not()` says what is missing. The machine's firewall is not changed and sees none of this
traffic: the switch is a bridge in its own namespace. Leaving the `Network` removes everything that it created.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from typing import IO

from support.system import wait_until

# From the range that RFC 2544 reserves for network tests: no real host uses it.
_PREFIX = "198.18"
_NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no interface has: packets to it are lost silently."""

_CABLE_TO = ("type", "veth", "peer", "name")


def why_not() -> str | None:
    """Why this machine cannot create such hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"network namespaces need {' and '.join(missing)} (iproute2)"
    probe = f"kvprobe{secrets.token_hex(3)}"
    script = f"ip netns add {probe} && ip -n {probe} link add br0 type bridge && ip -n {probe} link add name p0 type veth peer name p1"
    made = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None if made.returncode == 0 else f"network namespaces cannot be created here: {made.stderr.strip()}"


def _ip(*args: str) -> str:
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout


class Host:
    """One namespace with the interface eth0 and the address `address`."""

    def __init__(self, network: Network, name: str, index: int) -> None:
        self.namespace = f"{network.tag}{name}"
        self.name = name
        self.address = f"{_PREFIX}.{network.third}.{index}"
        _ip("netns", "add", self.namespace)
        _ip("link", "add", "name", "eth0", "netns", self.namespace, *_CABLE_TO, name, "netns", network.switch)
        _ip("-n", network.switch, "link", "set", name, "master", "br0", "up")
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")

    def inside(self, command: list[str]) -> list[str]:
        """The command that runs `command` on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def start(self, command: list[str], log: IO[bytes], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process on this host; its pid is that of the command."""
        return subprocess.Popen(
            self.inside(command),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env,
        )  # fmt: skip

    def drop_packets_to(self, other: Host) -> None:
        """From now on, packets from here to `other` are lost silently. The other direction still works."""
        _ip(
            "-n",
            self.namespace,
            "neigh",
            "replace",
            other.address,
            "lladdr",
            _NOBODY,
            "dev",
            "eth0",
            "nud",
            "permanent",
        )

    def restore_packets_to(self, other: Host) -> None:
        """Undo `drop_packets_to`."""
        with contextlib.suppress(subprocess.CalledProcessError):  # nothing was dropped
            _ip("-n", self.namespace, "neigh", "del", other.address, "dev", "eth0")

    def slow_down(self, mbit_s: float | None) -> None:
        """Limit the send rate of this host; None removes the limit."""
        command = ["tc", "-n", self.namespace, "qdisc"]
        if mbit_s is None:
            subprocess.run([*command, "del", "dev", "eth0", "root"], check=False, capture_output=True)
            return
        shape = ["tbf", "rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "200ms"]
        subprocess.run([*command, "replace", "dev", "eth0", "root", *shape], check=True, capture_output=True)

    def sent_bytes(self) -> int:
        """Bytes sent by the interface since it was created."""
        [link] = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth0"))
        return link["stats64"]["tx"]["bytes"]

    def remove(self) -> None:
        """Kill all processes on this host and remove it."""
        for pid in _ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: not self._running(), 10, f"nothing runs on host {self.name}")
        _ip("netns", "del", self.namespace)

    def _running(self) -> list[str]:
        pids = _ip("netns", "pids", self.namespace).split()
        return [pid for pid in pids if "(zombie)" not in Path(f"/proc/{pid}/status").read_text(errors="replace")]


class Network:
    """A switch, its hosts, and an interface through which this process reaches them."""

    def __init__(self, *names: str) -> None:
        self.tag = f"kv{secrets.token_hex(2)}"
        taken = {route["dst"] for route in json.loads(_ip("-j", "route", "show"))}
        self.third = secrets.choice([third for third in range(1, 255) if f"{_PREFIX}.{third}.0/24" not in taken])
        self.switch = f"{self.tag}switch"
        self.hosts: dict[str, Host] = {}
        self._names = names

    @property
    def address(self) -> str:
        """Our own address on this network."""
        return f"{_PREFIX}.{self.third}.254"

    def unplug(self, name: str) -> None:
        """From now on, all packets from and to a host are lost silently; its own interface stays up."""
        _ip("-n", self.switch, "link", "set", name, "nomaster")

    def plug_in(self, name: str) -> None:
        """Undo `unplug`."""
        _ip("-n", self.switch, "link", "set", name, "master", "br0")

    def __enter__(self) -> Network:
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "br0", "up")
            for index, name in enumerate(self._names, start=1):
                self.hosts[name] = Host(self, name, index)
            _ip("link", "add", "name", self.tag, *_CABLE_TO, "here", "netns", self.switch)
            _ip("-n", self.switch, "link", "set", "here", "master", "br0", "up")
            _ip("addr", "add", f"{self.address}/24", "dev", self.tag)
            _ip("link", "set", self.tag, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        for host in self.hosts.values():
            host.remove()
        # Removing the switch removes the other ends of all cables.
        for namespace in _ip("netns", "list").splitlines():
            if namespace.split()[0].startswith(self.tag):
                _ip("netns", "del", namespace.split()[0])
        wait_until(lambda: f" {self.tag}@" not in _ip("link", "show"), 10, "our own interface is gone")
