"""Admin routes of every service: its options, its latest log lines, facts about its process, and a profile of it.

No answer contains a secret or a prompt. Runs on the service's asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from common.base import logs, stack_sampler
from common.base.cores import usable_cores
from common.base.errors import BadRequest, Overloaded
from common.base.free_memory import free_memory_bytes
from common.config.fields import field_infos
from common.config.service_configs import ServiceConfig
from common.control.admin_server import AdminRoute, Call, seconds
from common.security.expiry import certificate_validity

_DIAL_S = 0.5
_MAX_ADDRESSES = 1000
_MAX_PROFILE_S = 60.0
_SHM, _NETWORKS = "/dev/shm", Path("/sys/class/net")  # noqa: S108 - looked at only

Facts = Callable[[], dict[str, Any]]
Profile = Callable[[float], bytes]
"""A Chrome trace of the next seconds, as JSON."""


def python_profile(duration_s: float) -> bytes:
    """Record a profile of this process's Python threads."""
    return json.dumps({"traceEvents": stack_sampler.record(duration_s)}).encode()


class SelfReport:
    """The admin routes that report on one service."""

    def __init__(
        self,
        options: dict[str, Any],
        tls_dir: str | None,
        profile: Profile = python_profile,
        devices: Facts = dict,
    ) -> None:
        """`options`: those of the service, see `public_options`. `devices`: facts about the GPUs that the process uses."""
        self._options = options
        self._tls_dir = tls_dir
        self._profile = profile
        self._devices = devices
        self._profiling = False
        self._versions = _versions()  # read now, because an upgrade changes the installed packages of a running process

    def routes(self) -> list[AdminRoute]:
        """The routes, for the admin port."""
        return [
            AdminRoute("GET", "/config", lambda call: self._options),
            AdminRoute("GET", "/logs", lambda call: {"lines": logs.recent()}),
            AdminRoute("POST", "/facts", self._facts),
            AdminRoute("POST", "/profile", self._record),
        ]

    async def _facts(self, call: Call) -> dict[str, Any]:
        """Return facts about this process and its host, and to which addresses in `dial` it cannot connect."""
        wanted = call.body.get("dial", [])
        if not isinstance(wanted, list) or len(cast("list[Any]", wanted)) > _MAX_ADDRESSES:
            raise BadRequest(f"dial must be a list of at most {_MAX_ADDRESSES} addresses", param="dial")
        valid = None if self._tls_dir is None else certificate_validity(self._tls_dir)
        found = await asyncio.gather(*(_dial(str(address)) for address in cast("list[Any]", wanted)))
        return {
            **process_facts(),
            "versions": self._versions,
            **self._devices(),
            "certificate_ends": None if valid is None else valid.ends.timestamp(),
            "unreachable": {name: why for name, why in found if why},
        }

    async def _record(self, call: Call) -> bytes:
        """Record a profile of the next `seconds`, compressed by gzip."""
        duration_s = seconds(call, "seconds", 5.0)
        if duration_s > _MAX_PROFILE_S:
            raise BadRequest(f"seconds may be at most {_MAX_PROFILE_S:g}", param="seconds")
        if self._profiling:
            raise Overloaded("another profile is being recorded")
        self._profiling = True
        try:
            return await asyncio.to_thread(lambda: gzip.compress(self._profile(duration_s), 1))
        finally:
            self._profiling = False


def public_options(config: ServiceConfig) -> dict[str, Any]:
    """The options as plain data: secrets only as "set" or empty, URLs without user, password and query."""
    infos = field_infos(type(config))
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return {name: ("set" if value else "") if infos[name].secret else _public(value) for name, value in values.items()}


def _public(value: Any) -> Any:
    if not isinstance(value, str) or "://" not in value:
        return value
    return re.sub(r"\?\S*", "", re.sub(r"://[^/\s]*@", "://", value))


def process_facts() -> dict[str, Any]:
    """Facts about this process and its host, as plain data."""
    shm_total, _, shm_free = shutil.disk_usage(_SHM) if os.path.isdir(_SHM) else (0, 0, 0)
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "open_files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "max_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm_total_bytes": shm_total,
        "shm_free_bytes": shm_free,
        "free_memory_bytes": free_memory_bytes(),
        "cpu_count": usable_cores(),
        "networks": list(_networks()),
        "nccl_socket_ifname": os.environ.get("NCCL_SOCKET_IFNAME", ""),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("kvrelay", "torch"):
        if name == "kvrelay" or name in sys.modules:
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(name)
    return found


def _networks() -> Iterable[str]:
    """Names of the network interfaces that are up, except loopback."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if name != "lo" and (_NETWORKS / name / "operstate").read_text().strip() == "up":
                yield name


async def _dial(address: str) -> tuple[str, str]:
    """Try to connect. Returns the address, and why that failed; empty if it succeeded."""
    try:
        parts = urlsplit(address)
        async with asyncio.timeout(_DIAL_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except TimeoutError:
        return address, f"no connection within {_DIAL_S:g} s"
    except (OSError, ValueError) as error:
        return address, getattr(error, "strerror", None) or str(error)
    writer.close()
    return address, ""
