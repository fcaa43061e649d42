"""Commands of `kvrelay` as processes of a test that need not import anything: a cluster starts in a tenth of the time.

`start(command, ...)` asks one server, which has imported what all services need and lives as long as the tests, to fork a
process. It runs what the command would run after its imports; what `kvrelay up` starts in it is forked in turn. Tests of starts,
and of what is imported, start commands themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

from support.paths import TESTS

from common.base.process import (
    die_with_parent,
    lasting_imports,
    prepare_compute,
    run_and_end,
    set_command_line,
)
from common.cli import commands, main
from common.config.sources import SUPERVISOR_VARIABLE
from common.tools.up import child, fork_client, fork_server, supervisor
from common.tools.up.console import Console
from common.tools.up.fork_client import ForkServer
from common.tools.up.plan import ChildSpec

if TYPE_CHECKING:
    from support.network_hosts import Host

_OWN_VARIABLES = ("KVRELAY_", "XDG_RUNTIME_DIR", "OMP_WAIT_POLICY")
"""Variables whose values are read after the imports, by how their names begin."""
_LONGEST_COMMAND, _REQUEST_BYTES, _ANSWER_BYTES, _MAX_DESCRIPTORS = 6000, 1 << 17, 1 << 12, 1 << 16
_KVRELAY = ("-m", "common.cli")
_CLONE_NEWNET = 0x40000000


class WarmProcess:
    """A process that the server forked. Has the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: _Server, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """As `Popen.poll`."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As `Popen.send_signal`."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """As `Popen.terminate`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """As `Popen.kill`."""
        self.send_signal(signal.SIGKILL)


Process = WarmProcess | subprocess.Popen[bytes]


def allow() -> None:
    """From now on `start` forks. Programs that measure do not call this."""
    global _allowed
    _allowed = True


def start(command: list[str], output: IO[bytes], env: Mapping[str, str], host: Host | None = None) -> Process:
    """Run a command of `kvrelay`, on a host of its own if there is one; `output` gets standard output and standard error.

    One whose environment differs from ours where modules look when they are imported is executed, not forked.
    """
    changed = {name for name, _ in env.items() ^ os.environ.items()}
    if _allowed and tuple(command[1:3]) == _KVRELAY and all(name.startswith(_OWN_VARIABLES) for name in changed):
        return _running().fork(command, env, output, "" if host is None else host.namespace)
    if host is not None:
        return host.start(command, output, dict(env))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)


def run(*arguments: str, timeout_s: float = 120.0) -> tuple[int, str]:
    """The exit code of `kvrelay ARGUMENTS`, and what it wrote. Raises: subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile() as output:
        process = start([sys.executable, *_KVRELAY, *arguments], output, os.environ)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return code, output.read().decode()


def server_pid() -> int | None:
    """The server's, which outlives the test that started it."""
    return None if _server is None else _server.process.pid


class _Server:
    """The test's side of the server."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "support.warm_start", str(theirs.fileno()), " " * _LONGEST_COMMAND],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            )

    def fork(self, command: list[str], environ: Mapping[str, str], output: IO[bytes], namespace: str) -> WarmProcess:
        """A process that does what `command` would, in a network namespace or, if that is "", in ours."""
        request = json.dumps([command, dict(environ), os.getcwd(), namespace]).encode()
        with self._lock:
            socket.send_fds(self._channel, [request], [output.fileno()])
            while not isinstance(pid := self._next(None), int):
                pass
        return WarmProcess(self, pid)

    def code_of(self, pid: int, timeout_s: float | None) -> int | None:
        """The return code of a process that it forked, None if it still runs after that time."""
        with self._lock:
            while pid not in self._codes and self._next(timeout_s) is not None:
                pass
            return self._codes.get(pid)

    def _next(self, timeout_s: float | None) -> int | list[int] | None:
        """The next message: a pid, the answer to a request, or what has ended and how; None if none comes in time."""
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
_allowed = False


def _running() -> _Server:
    global _server
    if _server is None:
        _server = _Server()
    return _server


# ------------------------------------------------------------ the server


def _serve(channel: socket.socket) -> None:
    """Fork a process for each request until the test closes its end; tell which ones have ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([channel, reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
            _tell_ended(channel)
        if channel in ready:
            data, descriptors, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 1)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (channel.detach(), reading, writing):
                    os.close(descriptor)
                run_and_end(partial(_be_command, *json.loads(data), output=descriptors[0]))
            os.close(descriptors[0])
            channel.send(str(pid).encode())


def _tell_ended(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            channel.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())


def _be_command(command: list[str], environ: dict[str, str], folder: str, namespace: str, output: int) -> None:
    if namespace:
        _enter(namespace)
    if SUPERVISOR_VARIABLE in environ:
        environ[SUPERVISOR_VARIABLE] = str(os.getppid())
    _take_over(environ, output)
    os.chdir(folder)
    set_command_line(command)
    sys.path[:] = [folder, *[place for place in sys.path if place not in (str(TESTS), str(TESTS.parent))]]
    sys.argv = ["kvrelay", *command[1 + len(_KVRELAY) :]]
    _fork_what_up_starts()
    main()


def _enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _take_over(environ: Mapping[str, str], output: int) -> None:
    """Signals, environment and output as those of a process that was executed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)


def _fork_what_up_starts() -> None:
    """In this process, have `kvrelay up` fork its fork server, and that one fork routers as well as nodes."""

    class Child(child.Child):
        def __init__(self, spec: ChildSpec, console: Console, fork_server: ForkServer | None = None) -> None:
            super().__init__(spec, console, fork_server)
            self._fork_server = fork_server if _KVRELAY[1] in spec.argv else None

    supervisor.Child = Child
    fork_client.subprocess = SimpleNamespace(Popen=_ForkServerProcess, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


class _ForkServerProcess:
    """In the place of `Popen`: the fork server of `kvrelay up` as a fork of this process."""

    def __init__(self, command: list[str], *, pass_fds: list[int], env: dict[str, str], **_: Any) -> None:
        parent_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            run_and_end(lambda: self._serve(command, pass_fds[0], env, parent_pid))

    @staticmethod
    def _serve(command: list[str], channel: int, environ: dict[str, str], parent_pid: int) -> None:
        die_with_parent(parent_pid)
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        _take_over(environ, nowhere)
        os.closerange(3, channel)
        os.closerange(channel + 1, _MAX_DESCRIPTORS)
        set_command_line(command)
        fork_server.serve(socket.socket(fileno=channel), [])

    def kill(self) -> None:
        """As `Popen.kill`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        """As `Popen.wait`."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_compute(None, nice=0)
    with lasting_imports():
        for _name in ("prefill", "decode"):
            importlib.import_module(commands()[_name].module).preload()
        importlib.import_module("router.service")
    _serve(socket.socket(fileno=int(sys.argv[1])))
