"""Ranks of a node as processes of a test, without a node around them.

`run_ranks(job, cases)` asks one helper process, which imports each job (and torch) once and lives as long as the tests.
For each case it forks one process per rank, which calls `job(place, port, listener, **arguments)`, and returns each rank's
result or how the rank ended.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from support.paths import TESTS

from common.base.process import die_with_parent
from common.parallel.place import RankPlace


@dataclass(frozen=True)
class Case:
    """`tp * pp * cp` ranks; those in `absent` never start."""

    tp: int
    pp: int
    arguments: dict[str, Any] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    cp: int = 1
    is_data_parallel: bool = False


@dataclass(frozen=True)
class Outcome:
    """`value` is what the job returned (JSON); `error` and `message` what it raised; `signal` what killed it."""

    value: Any = None
    error: str = ""
    message: str = ""
    signal: int = 0
    seconds: float = 0.0


class _Helper:
    """The helper process; started by the first call, ended by the end of this process."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.rank_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )

    def ask(self, job: str, cases: list[Case], timeout_s: float) -> list[list[Outcome]]:
        """Raises: TimeoutError if the cases take longer; RuntimeError if the helper ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([job, [asdict(case) for case in cases]]) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            self.end()
            raise TimeoutError(f"{job} did not end within {timeout_s:g} s")
        line = self.process.stdout.readline()
        if not line:
            self.end()
            raise RuntimeError(f"the helper process ended during {job}")
        return [[Outcome(**outcome) for outcome in case] for case in json.loads(line)]

    def end(self) -> None:
        """Kill it; the ranks that it forked die with it."""
        global _helper
        _helper = None
        self.process.kill()
        self.process.communicate()


_helper: _Helper | None = None


def helper_pid() -> int | None:
    """Pid of the helper process, which outlives the test that started it."""
    return None if _helper is None else _helper.process.pid


def run_ranks(job: str, cases: list[Case], timeout_s: float = 120.0) -> list[list[Outcome]]:
    """Run each case after the other; `job` is "module:function". Per case, the outcome of each rank in order."""
    global _helper
    if _helper is None:
        _helper = _Helper()
    return _helper.ask(job, cases, timeout_s)


def _run_case(job: Callable[..., Any], case: Case) -> list[Outcome]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    me = os.getpid()
    children: dict[int, tuple[int, int]] = {}
    for rank in range(case.tp * case.pp * case.cp):
        if rank in case.absent:
            continue
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent(me)
            place = RankPlace.of(rank, case.tp, case.pp, case.cp, case.is_data_parallel)
            os.write(write_end, json.dumps(asdict(_run_rank(job, place, port, listener, case.arguments))).encode())
            os._exit(0)
        os.close(write_end)
        children[rank] = (pid, read_end)
    listener.close()
    try:
        return [_collect(*children[rank]) for rank in sorted(children)]
    finally:
        for pid, _ in children.values():
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


def _run_rank(job: Callable[..., Any], place: RankPlace, port: int, listener: socket.socket, arguments: dict[str, Any]):
    mine: socket.socket | None = listener
    if place.rank != 0:
        listener.close()
        mine = None
    started = time.monotonic()
    try:
        return Outcome(value=job(place, port, mine, **arguments), seconds=time.monotonic() - started)
    except BaseException as error:
        traceback.print_exc()
        return Outcome(error=type(error).__name__, message=str(error), seconds=time.monotonic() - started)


def _collect(pid: int, read_end: int) -> Outcome:
    """The outcome that a rank wrote; the caller kills a rank that stopped itself."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    with os.fdopen(read_end, "rb", closefd=True) as stream:
        if os.WIFSTOPPED(status):
            return Outcome(signal=signal.SIGSTOP)
        if os.WIFSIGNALED(status):
            return Outcome(signal=os.WTERMSIG(status))
        return Outcome(**json.loads(stream.read()))


def _main() -> None:
    die_with_parent(os.getppid())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what jobs print must not be taken for an answer
    for line in sys.stdin:
        name, cases = json.loads(line)
        module, _, function = name.partition(":")
        job = getattr(importlib.import_module(module), function)
        outcomes = [[asdict(outcome) for outcome in _run_case(job, Case(**case))] for case in cases]
        print(json.dumps(outcomes), file=out, flush=True)


if __name__ == "__main__":
    _main()
