"""A separate measuring process: one object whose methods the benchmark calls over a pipe, as JSON lines.

A separate process has its own OpenMP team, GIL and memory, so that measurements do not affect each other.
This file is also the child's program (`python worker.py PARENT_PID load.module:Class JSON`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.network_hosts import Host

ROOT = Path(__file__).resolve().parents[2]
SEARCH_PATH = [str(ROOT), str(ROOT / "tests")]
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""The nodes' setting: an OpenMP team that waits passively leaves the cores to other processes at once."""
RESULT_TIMEOUT_S = 1200.0
"""Longer than any call takes: a worker that hangs must not hang its benchmark."""


def child_env() -> dict[str, str]:
    """PYTHONPATH for a child: this repository, and the current PYTHONPATH."""
    inherited = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*SEARCH_PATH, *([inherited] if inherited else [])])}


class WorkerFailed(Exception):
    """A call raised in the worker, or the worker ended or was too slow. The message is the worker's traceback, if any."""


class Worker:
    """A child process that holds one `bench.<module>:<Class>(**arguments)`; ends with `close` or with its parent."""

    def __init__(
        self,
        target: str,
        *,
        environ: dict[str, str] | None = None,
        host: Host | None = None,
        left_s: Callable[[], float] = lambda: RESULT_TIMEOUT_S,
        **arguments: Any,
    ) -> None:
        """`host`: the network namespace to run in, instead of our own. `left_s`: how much longer the
        caller will wait for results; a worker that is slower is killed."""
        command = [sys.executable, __file__, str(os.getpid()), target, json.dumps(arguments)]
        if host is not None:
            command = host.inside(command)
        # The wait policy affects the measurement, so the environment of the caller's shell does not apply.
        inherited = {k: v for k, v in os.environ.items() if k not in PASSIVE}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, **child_env(), **(environ or {})},
            bufsize=0,
        )
        self._target = target
        self._left_s = left_s
        self._unread = b""
        try:
            self.result()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, **arguments: Any) -> Any:
        """Run a method there and wait for its result.

        Raises: WorkerFailed.
        """
        self.start(method, **arguments)
        return self.result()

    def start(self, method: str, **arguments: Any) -> None:
        """Begin a call whose result `result` will fetch."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([method, arguments]).encode() + b"\n")
        except BrokenPipeError as error:
            raise WorkerFailed(f"the worker {self._target} has ended") from error

    def result(self) -> Any:
        """What the call begun by `start` returned. Raises: WorkerFailed."""
        answer = json.loads(self._line())
        if "error" in answer:
            raise WorkerFailed(f"{self._target}:\n{answer['error']}")
        return answer["result"]

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + self._left_s()
        readable = select.poll()
        readable.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._unread:
            if not readable.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                self._process.kill()
                raise WorkerFailed(f"the worker {self._target} did not answer in time, it was killed")
            part = self._process.stdout.read(2**16)
            if not part:
                raise WorkerFailed(f"the worker {self._target} ended with code {self._process.wait()}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _child(parent_pid: int, target: str, arguments: dict[str, Any]) -> None:
    from common.base.process import die_with_parent

    die_with_parent(parent_pid)
    # The pipe is only for answers; printed text goes to the terminal.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def attempt(action: Any) -> Any:
        try:
            result = action()
        except Exception:  # sent to the parent, which raises it there
            answer: dict[str, Any] = {"error": traceback.format_exc()}
            result = None
        else:
            answer = {"result": None if action is make else result}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        return result

    module, _, name = target.partition(":")

    def make() -> Any:
        from common.base.process import lasting_imports

        with lasting_imports():  # as services do
            found = getattr(importlib.import_module(module), name)
        return found(**arguments)

    held = attempt(make)
    if held is None:
        return
    for line in sys.stdin:
        method, keywords = json.loads(line)
        attempt(lambda method=method, keywords=keywords: getattr(held, method)(**keywords))
    close = getattr(held, "close", None)
    if close is not None:
        close()


if __name__ == "__main__":
    sys.path[:0] = SEARCH_PATH
    _child(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
