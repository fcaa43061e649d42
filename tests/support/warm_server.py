"""The server behind `support.warm_start`: imports what services need, and forks itself for each process that a test asks for."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from support.paths import TESTS
from support.warm_start import KVRELAY

from common.base.process import (
    die_with_parent,
    lasting_imports,
    prepare_compute,
    run_and_end,
    set_command_line,
)
from common.config.sources import SUPERVISOR_VARIABLE
from kvrelay.command import commands, main
from kvrelay.up import fork_client, fork_server

_REQUEST_BYTES, _MAX_DESCRIPTORS = 1 << 17, 1 << 16
_CLONE_NEWNET = 0x40000000


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
            data, descriptors, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 2)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                for descriptor in (channel.detach(), reading, writing):
                    os.close(descriptor)
                run_and_end(partial(_be_command, descriptors, *json.loads(data)))
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(str(pid).encode())


def _tell_ended(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            channel.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())


def _be_command(
    descriptors: list[int], command: list[str], environ: dict[str, str], folder: str, namespace: str
) -> None:
    if namespace:
        _enter(namespace)
    if SUPERVISOR_VARIABLE in environ:
        environ[SUPERVISOR_VARIABLE] = str(os.getppid())
    is_script = command[1] == "-c"
    _take_over(environ, descriptors, (1, 0) if is_script else (1, 2))
    os.chdir(folder)
    set_command_line(command)
    sys.path[:] = [folder, *[place for place in sys.path if place not in (str(TESTS), str(TESTS.parent))]]
    if is_script:
        sys.argv = command[1:2] + command[3:]
        exec(command[2], {"__name__": "__main__"})
        return
    sys.argv = ["kvrelay", *command[1 + len(KVRELAY) :]]
    _fork_what_up_starts()
    main()


def _enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _take_over(environ: Mapping[str, str], descriptors: list[int], places: tuple[int, ...]) -> None:
    """Set signals, environment and standard streams as exec would; places beyond the last descriptor share that one."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    cast("io.TextIOWrapper", sys.stdout).reconfigure(line_buffering=bool(environ.get("PYTHONUNBUFFERED")))
    for index, place in enumerate(places):
        os.dup2(descriptors[min(index, len(descriptors) - 1)], place)
    for descriptor in descriptors:
        os.close(descriptor)


def _fork_what_up_starts() -> None:
    """In this process, have `kvrelay up` fork its fork servers."""
    fork_client.subprocess = SimpleNamespace(Popen=_ForkServerProcess, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


class _ForkServerProcess:
    """A fork server of `kvrelay up`, forked from this process; replaces `Popen`."""

    def __init__(self, command: list[str], *, pass_fds: list[int], env: dict[str, str], **_: Any) -> None:
        parent_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            run_and_end(lambda: self._serve(command, pass_fds[0], env, parent_pid))

    @staticmethod
    def _serve(command: list[str], channel: int, environ: dict[str, str], parent_pid: int) -> None:
        die_with_parent(parent_pid)
        os.setsid()
        _take_over(environ, [os.open(os.devnull, os.O_RDWR)], (0, 1, 2))
        os.closerange(3, channel)
        os.closerange(channel + 1, _MAX_DESCRIPTORS)
        set_command_line(command)
        fork_server.serve(socket.socket(fileno=channel), [])

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_compute(None, nice=0)
    with lasting_imports():
        for _name in ("prefill", "decode", "router"):
            importlib.import_module(commands()[_name].module).preload()
    _serve(socket.socket(fileno=int(sys.argv[1])))
