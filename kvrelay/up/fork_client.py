"""The supervisor's side of fork servers: starts them, has them fork services, watches these. Supervisor's asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Generator, Mapping, Sequence

from common.base.process import adopt_orphans, module_command
from common.config.sources import SUPERVISOR_VARIABLE
from kvrelay.up.fork_server import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES
from kvrelay.up.gpus import find_gpus

_NODE_COMMANDS, _ROUTER_COMMANDS = ("prefill", "decode"), ("router",)
"""The services that one server forks: routers neither wait for PyTorch nor have it in their memory."""
_NODE_ROLES = ("prefill", "decode", "pooling")
_LONGEST_COMMAND = 3000
"""Characters of a service's command line that `ps` can show: a forked process has the room of the server's own."""
_ORPHANS_S = 5.0
_ANSWER_S = 60.0
"""Time for a fork, the server's imports and the tokenizer included."""


@contextlib.contextmanager
def fork_servers_for(device: str) -> Generator[dict[str, ForkServer]]:
    """Fork servers for a cluster whose nodes compute on `device`, by the role of what they fork. Empty where there can be none;
    without one for nodes on GPUs: CUDA does not survive a fork."""
    servers: dict[str, ForkServer] = {}
    with contextlib.suppress(OSError):
        if device == "cpu" or (device == "auto" and not find_gpus(os.environ)):
            of_nodes = ForkServer(_NODE_COMMANDS)
            of_nodes.start()  # what it imports is the longest part of a start
            servers |= dict.fromkeys(_NODE_ROLES, of_nodes)
        servers["router"] = ForkServer(_ROUTER_COMMANDS)
    try:
        yield servers
    finally:
        for server in set(servers.values()):
            server.close()


class ForkServer:
    """A server that runs from `start` or the first fork on. Services are forked one after the other."""

    def __init__(self, commands: Sequence[str]) -> None:
        """A server for services that run one of the subcommands `commands`. Raises: OSError if there can be no server here."""
        adopt_orphans()
        os.close(os.pidfd_open(os.getpid()))  # some sandboxes refuse it
        self._commands = commands
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = asyncio.Lock()

    def start(self) -> socket.socket:
        """Start it, if it does not run yet. Returns our end of its channel. Raises: OSError."""
        if self._channel is not None:
            return self._channel
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            module = module_command("kvrelay.up.fork_server")
            self._process = subprocess.Popen(
                [*module, str(theirs.fileno()), " ".join(self._commands), " " * _LONGEST_COMMAND],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", SUPERVISOR_VARIABLE: str(os.getpid())},
            )
        self._channel.setblocking(False)
        return self._channel

    async def fork(self, argv: Sequence[str], environ: Mapping[str, str], model_path: str) -> ForkedProcess:
        """A new process that does what `argv` would, in a session of its own, with `environ` added to its environment.

        argv, model_path: as `kvrelay.up.fork_server.serve` expects them. Raises: OSError.
        """
        request = json.dumps([list(argv), dict(environ), model_path]).encode()
        if len(request) > MAX_REQUEST_BYTES:
            raise OSError(f"{len(request)} bytes of options are too many")
        reading, writing = os.pipe()
        output = os.fdopen(reading, "rb", 0)
        try:
            async with self._one_at_a_time:
                answer = await self._ask(self.start(), request, writing)
            if not answer.isdigit():
                raise OSError(answer.decode() or "it has ended")
            return await ForkedProcess.watch(int(answer), output)
        except BaseException:
            output.close()
            raise
        finally:
            os.close(writing)

    async def _ask(self, channel: socket.socket, request: bytes, output: int) -> bytes:
        try:
            async with asyncio.timeout(_ANSWER_S):
                socket.send_fds(channel, [request], [output])
                return await asyncio.get_running_loop().sock_recv(channel, MAX_ANSWER_BYTES)
        except BaseException:
            # A late answer would be taken for that of another request, and nobody would watch a service that is forked late.
            self.close()
            raise

    def close(self) -> None:
        """End the server; the services live on."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """A forked process, which is a child of this one. It has the methods of `asyncio.subprocess.Process` that `Child` uses."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        """What the process writes to its standard output and standard error."""
        self.returncode: int | None = None
        self._handle = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._handle, self._on_end)

    @classmethod
    async def watch(cls, pid: int, output: io.FileIO) -> ForkedProcess:
        """Watch the child `pid` and read its output from the pipe `output`. Raises: OSError if there is no such child."""
        stdout = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(stdout)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, output)
        return cls(pid, stdout)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        """Wait until the process has ended. Returns its exit code, or -N if signal N killed it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Raises: ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)  # until `_on_end`, the process id is not reused


async def watch_orphans(children: Callable[[], Collection[int | None]]) -> None:
    """Take note of adopted processes that have ended, such as ranks whose node died, until cancelled.

    children: pids of processes whose end others wait for; None for one that is just being started.
    """
    while True:
        await asyncio.sleep(_ORPHANS_S)
        pids = children()
        if None in pids:  # its process, which has no known pid yet, is no orphan
            continue
        with contextlib.suppress(ChildProcessError):  # no process at all
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in pids:
                os.waitpid(ended.si_pid, 0)
