"""Which host and which user a process belongs to: two processes share memory only if both agree. Linux only."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from pathlib import Path

from common.base.errors import ConfigError

_NAMESPACES = ("net", "user")
"""The abstract name of a Unix socket is visible in one network namespace; user ids are unique in one user namespace."""
_CREDENTIALS = struct.Struct("iii")


def host_id() -> str | None:
    """An id that is equal for two processes of one user that share a kernel and its sockets. Host names play no role.

    None where that cannot be determined, or where there is no anonymous shared memory (systems other than Linux).
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        for name in _NAMESPACES:
            stat = os.stat(f"/proc/self/ns/{name}")
            parts.append(f"{name}:{stat.st_dev}:{stat.st_ino}")
    except OSError:
        return None
    parts.append(f"uid:{os.geteuid()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def require_host_id() -> str:
    """`host_id()`. Raises: ConfigError where memory cannot be shared."""
    host = host_id()
    if host is None:
        raise ConfigError("shared memory needs Linux with memfd and /proc")
    return host


def user_of_peer(connected: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket: any user of this host may bind a free abstract name.

    Raises: OSError.
    """
    return _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
