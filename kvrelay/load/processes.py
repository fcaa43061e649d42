"""Runs a plan in several children that report on their standard output.

python -m kvrelay.load.processes     a child; its plan arrives as JSON on standard input
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import Process
from dataclasses import asdict
from typing import Any

from common.base.errors import KvRelayError
from common.base.process import module_command, tied_command
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.runner import LoadRunner, OnOutcome
from kvrelay.load.stream import run
from kvrelay.load.workload import Workload

_READY = b"ready\n"
_BEGIN_S = 0.05
"""Delay from the start signal to the first request: every child must have read the signal by then."""
_WRITE_EVERY_S = 0.5
_MAX_LINE_BYTES = 2**30


class LoadFailed(KvRelayError):
    """The run could not be carried out."""


async def run_on_children(plan: LoadPlan, on_outcome: OnOutcome) -> None:
    """Run the plan in `plan.processes` children. Raises: LoadFailed if one fails."""
    children: list[Process] = []
    try:
        for process in range(plan.processes):
            children.append(await _start(plan, process))
        # Each child prints a line when it is ready; then all begin at the same time.
        for child in children:
            if await _output(child).readline() != _READY:
                raise LoadFailed("a process of the load generator did not start")
        start = f"{time.perf_counter() + _BEGIN_S}\n".encode()
        for child in children:
            _input(child).write(start)
        codes = await asyncio.gather(*(_collect(child, on_outcome) for child in children))
        if any(codes):
            raise LoadFailed(f"a process of the load generator ended with {next(filter(None, codes))}")
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
                await child.wait()


async def _start(plan: LoadPlan, process: int) -> Process:
    command = tied_command(module_command("kvrelay.load.processes"))
    pipe = asyncio.subprocess.PIPE
    # In its own session: Ctrl-C must reach only the reporting process.
    child = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, limit=_MAX_LINE_BYTES, start_new_session=True
    )
    _input(child).write(json.dumps({"plan": asdict(plan), "process": process}).encode() + b"\n")
    return child


async def _collect(child: Process, on_outcome: OnOutcome) -> int:
    async for line in _output(child):
        on_outcome(RequestOutcome(**json.loads(line)))
    return await child.wait()


def _input(child: Process) -> asyncio.StreamWriter:
    assert child.stdin is not None
    return child.stdin


def _output(child: Process) -> asyncio.StreamReader:
    assert child.stdout is not None
    return child.stdout


class _Writer:
    """Writes outcomes as lines, in batches: one write each would cost more than the request."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._written_s = 0.0

    def take(self, outcome: RequestOutcome) -> None:
        self._lines.append(json.dumps(asdict(outcome)) + "\n")
        if time.perf_counter() - self._written_s > _WRITE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        sys.stdout.write("".join(self._lines))
        sys.stdout.flush()
        self._lines.clear()
        self._written_s = time.perf_counter()


def _main() -> None:
    message: dict[str, Any] = json.loads(sys.stdin.readline())
    writer, workload = _Writer(), Workload(LoadPlan(**message["plan"]))
    sys.stdout.write(_READY.decode())
    sys.stdout.flush()
    start = sys.stdin.readline()
    if start:
        run(LoadRunner(workload, message["process"], writer.take).run(float(start)))
        writer.flush()


if __name__ == "__main__":
    _main()
