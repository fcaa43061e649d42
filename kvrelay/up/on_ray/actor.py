"""The Ray actor that supervises one process of a service on its host. Ray restarts the actor, elsewhere if its host is gone.

The process dies with the actor: the kernel kills it when the actor's process ends, however that ends. Methods run on the
actor's main thread and return at once; the process is started and watched by a thread of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from common.base.endpoints import free_port
from common.base.process import module_command
from common.config.sources import SUPERVISOR_VARIABLE
from kvrelay.up.on_ray.services import HOST, RayService
from kvrelay.up.restarts import RestartPolicy

_KEPT_LINES = 2_000
_STEADY_S = 10.0
"""A process that ran this long has started: its death is no failure to start."""
_OF_RAY = "OMP_NUM_THREADS"
"""Ray sets it to the processors that an actor reserves; nodes choose their threads themselves."""


@dataclass(frozen=True)
class Report:
    """State of an actor and of its process."""

    digest: str
    """`RayService.digest` of what the actor runs."""
    host: str
    """Address of its host."""
    master_port: int
    """Port at which the ranks of a node on several hosts meet; 0 unless this is its first host."""
    pid: int | None
    started: int
    """Number of times that this actor has started the process."""
    exit_code: int | None
    """Return code of the last process that ended, as in `Popen`; None if none has."""
    has_started: bool
    """A process has run for a while."""
    lines: list[str]
    """Lines of output that the caller does not have yet."""
    next_line: int


class ServiceActor:
    """Runs one process until it is stopped, and again whenever it ends.

    A follower (a host of a node on several hosts, but the first) waits until `join` says where its leader is.
    """

    def __init__(self, service: RayService, *, is_follower: bool, hosts: int) -> None:
        self._service = service
        self._host = host = _own_address()
        self._words = tuple(host if word == HOST else word for word in service.words)
        self._master_port = free_port(host) if hosts > 1 and not is_follower else 0
        self._hosts = hosts
        self._joins: tuple[str, ...] | None = None
        if not is_follower:
            self._joins = self._join_words(0, host, self._master_port) if hosts > 1 else ()
        self._process: subprocess.Popen[bytes] | None = None
        self._policy = RestartPolicy()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._next_line = 0
        self._started, self._exit_code = 0, None
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stopping = False
        threading.Thread(target=self._supervise, name="process", daemon=True).start()

    def report(self, after_line: int = 0) -> Report:
        """after_line: the `next_line` of the caller's last report."""
        with self._lock:
            new = min(max(0, self._next_line - after_line), len(self._lines))
            return Report(
                self._service.digest,
                self._host,
                self._master_port,
                None if self._process is None else self._process.pid,
                self._started,
                self._exit_code,
                self._policy.was_ever_ready,
                list(self._lines)[len(self._lines) - new :],
                self._next_line,
            )

    def service(self) -> RayService:
        """What it runs; the environment has the admin token of the cluster."""
        return self._service

    def join(self, node_rank: int, leader: str, master_port: int) -> None:
        """Tell a follower where its leader is; if it has moved, the process starts again."""
        joins = self._join_words(node_rank, leader, master_port)
        if joins != self._joins:
            self._joins = joins
            self._signal(signal.SIGKILL)
            self._changed.set()

    def stop(self) -> None:
        """Let the process end; `report` has no pid when it has. It does not start again."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        self._changed.set()

    def _join_words(self, node_rank: int, leader: str, master_port: int) -> tuple[str, ...]:
        place = ("--nnodes", str(self._hosts), "--node-rank", str(node_rank))
        return (*place, "--master-addr", leader, "--master-port", str(master_port))

    def _supervise(self) -> None:
        while not self._stopping:
            if self._joins is None:
                self._changed.wait()
                self._changed.clear()
                continue
            ran_s = self._run((*self._words, *self._joins))
            if ran_s > _STEADY_S:
                self._policy.ready(time.monotonic() - ran_s)
            delay_s = self._policy.died(time.monotonic())
            self._changed.wait(0 if self._stopping else _STEADY_S if delay_s is None else delay_s)
            self._changed.clear()

    def _run(self, words: tuple[str, ...]) -> float:
        """Run the process to its end. Returns how long it ran, in seconds."""
        environ = {name: value for name, value in os.environ.items() if name != _OF_RAY}
        environ |= {"PYTHONUNBUFFERED": "1", **self._service.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
        started_s = time.monotonic()
        process = subprocess.Popen(
            (*module_command("kvrelay"), *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        with self._lock:
            self._process, self._started = process, self._started + 1
        if self._stopping:
            self._signal(signal.SIGTERM)
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                self._lines.append(line.decode("utf-8", "replace").rstrip())
                self._next_line += 1
            if not self._policy.was_ever_ready and time.monotonic() - started_s > _STEADY_S:
                self._policy.ready(time.monotonic())
        code = process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with self._lock:
            self._process, self._exit_code = None, code
        return time.monotonic() - started_s

    def _signal(self, signum: signal.Signals) -> None:
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signum)


def _own_address() -> str:
    """The address at which other hosts of the Ray cluster reach this one."""
    util: Any = importlib.import_module("ray.util")
    return util.get_node_ip_address()
