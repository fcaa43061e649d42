"""Ranks of a node as processes of a test, without a node around them.

`run_ranks(job, cases)` starts one helper process that imports `job` (and torch) once, then, for each case, forks one
process per rank and has it call `job(place, port, listener, **arguments)`. What each returned, or how it ended, comes back.
"""

from __future__ import annotations

import importlib
import json
import os
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
from common.parallel.mesh import RankPlace


@dataclass(frozen=True)
class Case:
    """`tp * pp` ranks, of which `absent` never start."""

    tp: int
    pp: int
    arguments: dict[str, Any] = field(default_factory=dict)
    absent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """`value` is what the job returned (JSON); `error` and `message` what it raised; `signal` what killed it."""

    value: Any = None
    error: str = ""
    message: str = ""
    signal: int = 0
    seconds: float = 0.0


def run_ranks(job: str, cases: list[Case], timeout_s: float = 120.0) -> list[list[Outcome]]:
    """Run each case after the other; `job` is "module:function". Per case, the outcome of each rank in order."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run(
        [sys.executable, __file__, job],
        input=json.dumps([asdict(case) for case in cases]),
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=True,
    )
    return [[Outcome(**outcome) for outcome in case] for case in json.loads(done.stdout.splitlines()[-1])]


def _run_case(job: Callable[..., Any], case: Case) -> list[Outcome]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    me = os.getpid()
    children: dict[int, tuple[int, int]] = {}
    for rank in range(case.tp * case.pp):
        if rank in case.absent:
            continue
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent(me)
            place = RankPlace.of(rank, case.tp, case.pp)
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
    """What the rank wrote; a rank that stopped itself is left for the caller to kill."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    with os.fdopen(read_end, "rb", closefd=True) as stream:
        if os.WIFSTOPPED(status):
            return Outcome(signal=signal.SIGSTOP)
        if os.WIFSIGNALED(status):
            return Outcome(signal=os.WTERMSIG(status))
        return Outcome(**json.loads(stream.read()))


def _main() -> None:
    die_with_parent(os.getppid())
    module, _, name = sys.argv[1].partition(":")
    job = getattr(importlib.import_module(module), name)
    cases = [Case(**case) for case in json.load(sys.stdin)]
    outcomes = [[asdict(outcome) for outcome in _run_case(job, case)] for case in cases]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    _main()
