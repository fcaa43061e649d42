"""One child process of `kvrelay up`: its start, its output, its end. Runs on the supervisor's asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque

from common.config.sources import SUPERVISOR_VARIABLE
from kvrelay.up.console import Console
from kvrelay.up.fork_client import ForkedProcess, ForkServer
from kvrelay.up.plan import ChildSpec
from kvrelay.up.restarts import RestartPolicy

_READ_BYTES = 65536
_KEPT_LINES = 20
_DRAIN_S = 1.0
"""After a child ends, a dying grandchild may keep its output open this long."""


class Child:
    """A child across all its restarts.

    Each process leads its own session: Ctrl-C in a terminal then reaches only the supervisor, and everything that the
    child has started can be killed with it.
    """

    def __init__(self, spec: ChildSpec, console: Console, fork_server: ForkServer | None = None) -> None:
        """`fork_server`: forks the process; None: it is started as a program."""
        self.spec = spec
        self.policy = RestartPolicy()
        self.ready = False
        """The current process is usable."""
        self.started_s = 0.0
        """Start of the current process, by `time.monotonic`."""
        self.started_at = 0.0
        """The same time by the wall clock."""
        self.address = ""
        self.role: str = spec.role
        """A node's role may have changed since its first start."""
        self.incarnation = ""
        """Incarnation of the process that registered last, the current or an earlier one; nodes only."""
        self.last_line = ""
        self._console = console
        self._fork_server = fork_server
        self._process: Process | ForkedProcess | None = None
        self._pump: asyncio.Task[None] | None = None
        self._hidden_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def pid(self) -> int | None:
        """None while no process runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        self.ready = False
        self.started_s, self.started_at = time.monotonic(), time.time()
        self.last_line = ""
        self._process = await self._fork() or await self._execute()
        assert self._process.stdout is not None
        self._pump = asyncio.create_task(self._read(self._process.stdout))

    async def _execute(self) -> Process:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", SUPERVISOR_VARIABLE: str(os.getpid()), **self.spec.environ}
        return await asyncio.create_subprocess_exec(
            *self.spec.argv, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=environ, start_new_session=True
        )

    async def _fork(self) -> ForkedProcess | None:
        """Fork the process. Returns None if there is no fork server, or it cannot fork now."""
        if self._fork_server is None:
            return None
        try:
            return await self._fork_server.fork(self.spec.argv, self.spec.environ, self.spec.model_path)
        except OSError as error:
            self._console.say(f"{self.spec.name} starts a second or two later, without the fork server: {error}")
            return None

    async def wait(self) -> int:
        """Wait for the process to end, show its remaining output, kill its process group. Returns its return code."""
        process, pump = self._process, self._pump
        assert process is not None, "not started"
        assert pump is not None
        return_code = await process.wait()
        self.ready = False
        self._kill_group(process.pid)
        done, _ = await asyncio.wait([pump], timeout=_DRAIN_S)
        if not done:
            pump.cancel()
            await asyncio.wait([pump])
        if self._process is process:
            self._process = None
        return return_code

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process, if it runs; SIGKILL reaches its whole group."""
        if self._process is None or self._process.returncode is not None:
            return
        if signum is signal.SIGKILL:
            self._kill_group(self._process.pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def show_hidden_lines(self) -> None:
        """Show the last lines of a quiet child that ended unexpectedly."""
        while self._hidden_lines:
            self._console.child_line(self.spec.name, self._hidden_lines.popleft())

    @staticmethod
    def _kill_group(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    async def _read(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await output.read(_READ_BYTES):
            # Cut an endless line rather than let the buffer grow.
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _READ_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._show(line)
        if rest:
            self._show(rest)

    def _show(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip()
        if line:
            self.last_line = line
        if self.spec.quiet:
            self._hidden_lines.append(line)
        else:
            self._console.child_line(self.spec.name, line)
