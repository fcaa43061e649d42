"""Forks the processes of tests from one that has imported everything: a cluster starts in a sixth of the processor time.

`start` runs commands of `kvrelay`, `script` pieces of Python. Both ask one server (`support.warm_server`), which has imported
what all services need and lives as long as the tests, to fork a process. What runs is what the command would run after its
imports; what `kvrelay up` starts is forked in turn. Tests of starts and of imports execute commands instead.

All processes of one server have the same seed of `hash`, and what modules read when they are imported is that of the server.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING

from support.paths import TESTS

if TYPE_CHECKING:
    from support.network_hosts import Host

KVRELAY = ("-m", "kvrelay")
"""Begins the arguments of Python that run a command."""
_OWN_VARIABLES = ("KVRELAY_", "XDG_RUNTIME_DIR", "PYTEST_", "PYTHONUNBUFFERED", "TORCHINDUCTOR_")
"""Name prefixes of variables that services do not read during imports. Transformers sets the last one."""
_COMPUTE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Services set these themselves, before their imports."""
_LONGEST_COMMAND, _ANSWER_BYTES = 6000, 1 << 12
_ANSWER_S = 120.0
"""Time for the server's imports and a fork."""
_LOOK_S = 0.02


class WarmProcess:
    """A process that the server forked. Has the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: _Server, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile, and the server has its exit code
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmScript(WarmProcess):
    """A forked process that runs a piece of Python; lines of text pass its standard input and output."""

    def __init__(self, server: _Server, pid: int, stdin: int, stdout: int) -> None:
        super().__init__(server, pid)
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout)

    def end(self) -> None:
        """Kill it."""
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()


Process = WarmProcess | subprocess.Popen[bytes]


def allow() -> None:
    """From now on `start` forks, in the present environment. Programs that measure do not call this."""
    global _environ
    _environ = {**_COMPUTE, **os.environ}


def start(command: list[str], output: IO[bytes], env: Mapping[str, str], host: Host | None = None) -> Process:
    """Run a command of `kvrelay`, on a host of its own if there is one; `output` gets standard output and standard error.

    It is executed, not forked, if its environment differs in a variable that modules read while they are imported.
    """
    if _environ is not None and tuple(command[1:3]) == KVRELAY and (server := _running()).fits(env):
        return WarmProcess(server, server.fork(command, env, [output.fileno()], "" if host is None else host.namespace))
    if host is not None:
        return host.start(command, output, dict(env))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)


def run(*arguments: str, timeout_s: float = 120.0) -> tuple[int, str]:
    """The exit code of `kvrelay ARGUMENTS`, and what it wrote. Raises: subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile() as output:
        process = start([sys.executable, *KVRELAY, *arguments], output, os.environ)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return code, output.read().decode()


def script(code: str, *arguments: str) -> WarmScript:
    """Run `python -c CODE ARGUMENTS`."""
    (their_in, stdin), (stdout, their_out) = os.pipe(), os.pipe()
    server = _running()
    pid = server.fork([sys.executable, "-c", code, *arguments], os.environ, [their_out, their_in], "")
    os.close(their_in)
    os.close(their_out)
    return WarmScript(server, pid, stdin, stdout)


def environ() -> dict[str, str]:
    """The environment in which `start` forks; earlier tests of this process may have left others."""
    assert _environ is not None, "not allowed"
    return _environ


def server_pid() -> int | None:
    """Pid of the server, which outlives the test that started it."""
    return None if _server is None else _server.process.pid


class _Server:
    """The test's side of the server. Any thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.warm_server", str(theirs.fileno()), " " * _LONGEST_COMMAND],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**self._environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": ""},
            )

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Whether modules have found what they would find in this environment."""
        changed = {**_COMPUTE, **environ}.items() ^ self._environ.items()
        return all(name.startswith(_OWN_VARIABLES) for name, _ in changed)

    def fork(self, command: list[str], environ: Mapping[str, str], descriptors: list[int], namespace: str) -> int:
        """The pid of a process that does what `command` would, in a network namespace or, if that is "", in ours.

        descriptors: its output, and its input if it has one.
        """
        request = json.dumps([command, dict(environ), os.getcwd(), namespace]).encode()
        with self._lock:
            try:
                socket.send_fds(self._channel, [request], descriptors)
                while not isinstance(pid := self._next(_ANSWER_S), int):
                    if pid is None:
                        raise TimeoutError("the server of warm starts does not answer")
            except BaseException:  # a late answer would be that of another request
                self.process.kill()
                raise
            self._codes.pop(pid, None)  # of an earlier process with this pid
        return pid

    def code_of(self, pid: int, timeout_s: float | None) -> int | None:
        """Exit code of a process that it forked; None if that still runs after `timeout_s`."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                while pid not in self._codes and self._next(0.0) is not None:
                    pass
                if pid in self._codes:
                    return self._codes[pid]
            if (left_s := end - time.monotonic()) <= 0:
                return None
            # Other threads may fork, look and wait meanwhile, and take the message.
            select.select([self._channel], [], [], min(left_s, _LOOK_S))

    def _next(self, timeout_s: float | None) -> int | list[int] | None:
        """The next message, None if none comes in time: the pid of a fork, or the pid and exit code of an ended process."""
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return None
        data = self._channel.recv(_ANSWER_BYTES)
        if not data:
            raise RuntimeError("the server of warm starts has ended")
        message: int | list[int] = json.loads(data)
        if isinstance(message, list):
            self._codes[message[0]] = message[1]
        return message


_server: _Server | None = None
_environ: dict[str, str] | None = None
"""The server's environment, without variables that single tests set; None if the server must not be used."""


def _running() -> _Server:
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = _Server(environ())
    return _server
