"""Ports for servers that tests start: below those that the kernel hands out, and no two alike in the test runs of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST, _COUNT = 11_000, 11_000
"""A port's cluster bus of Redis, 10,000 higher, is below the kernel's range, too."""
_NEXT = Path(tempfile.gettempdir()) / f"kvrelay-test-ports-{os.getuid()}"


def free_port() -> int:
    """A TCP port on which nothing listens, and which nobody else will get while this test runs."""
    return ports_in_a_row(1)[0]


def ports_in_a_row(count: int) -> list[int]:
    """Consecutive ports, each as `free_port` gives them."""
    while True:
        ports = _take(count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in ports:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports


def _take(count: int) -> list[int]:
    """The next ones of all test processes; after the last port come the first again."""
    with _NEXT.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        taken = int(file.read() or 0)
        if taken + count > _COUNT:
            taken = 0
        file.truncate(0)
        file.write(str(taken + count))
    return list(range(_FIRST + taken, _FIRST + taken + count))
