"""A cluster whose services run from two source trees: this one, and that of the commit before the last change of the protocol."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.paths import ROOT
from support.ports import free_port

from common.control.versions import OLDEST_VERSION, PROTOCOL_VERSION

OLDER_COMMIT = "d505fb17b7718b08ac392f5645d3cf5d78e18845"
"""The last commit of protocol version `OLDEST_VERSION`."""
_COMPILE_S, _END_S = 600.0, 30.0
RESTART = 75
"""Exit code of a service that wants to be started again."""


def older_tree(folder: Path) -> Path:
    """The sources of `OLDER_COMMIT`, with their native kernels. Skips the test, which is counted, if the history lacks it."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", OLDER_COMMIT], capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"needs the git history back to commit {OLDER_COMMIT[:8]}, which this clone lacks")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    build = [sys.executable, "-m", "common.kernels.native.build"]
    subprocess.run(build, cwd=folder, env=_of(folder), check=True, timeout=_COMPILE_S, capture_output=True)
    return folder


def _of(tree: Path) -> dict[str, str]:
    """The environment in which Python imports our packages from `tree`."""
    return {**os.environ, "PYTHONPATH": str(tree)}


@dataclass
class Service:
    """A service, through all its processes. `tree` is where its process runs from."""

    command: Sequence[str]
    tree: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: list[Path] = field(default_factory=list[Path])

    def start(self) -> None:
        with self.log.open("ab") as log:
            env = {**_of(self.tree), "KVRELAY_SUPERVISOR_PID": str(os.getpid())}
            command = [sys.executable, "-m", "kvrelay", *self.command]
            self.process = subprocess.Popen(command, cwd=self.tree, env=env, stdout=log, stderr=log)
        self.starts.append(self.tree)


@contextlib.contextmanager
def supervised(services: dict[str, Service], trees: tuple[Path, Path]) -> Iterator[None]:
    """Run the services until the block ends. One that asks for a restart comes back from the other of the two trees."""
    ending = threading.Event()

    def supervise() -> None:
        """Start, restart and end all of them: a process ends with the thread that started it."""
        try:
            for service in services.values():
                service.start()
            while not ending.wait(0.05):
                for service in services.values():
                    if service.process is not None and service.process.poll() == RESTART:
                        service.tree = trees[1] if service.tree == trees[0] else trees[0]
                        service.start()
        finally:
            for service in services.values():
                if service.process is not None:
                    service.process.terminate()
            for service in services.values():
                if service.process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        service.process.wait(_END_S)
                    service.process.kill()
                    service.process.wait()

    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@dataclass(frozen=True)
class Place:
    """Where a service listens: HTTP and admin port of a router, the control port of a node."""

    port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"


def spoken_at(url: str) -> int:
    """The newest protocol version that the node at a control port speaks, from its greeting."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 0), 5.0) as connection:
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        return OLDEST_VERSION if size == 1 else PROTOCOL_VERSION
