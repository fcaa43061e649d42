"""Runs a plan in the calling process, or in several children that report on their standard output.

python -m kvrelay.load.processes     a child; its plan arrives as JSON on standard input
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from common.base.errors import KvRelayError
from common.base.process import module_command, tied_command
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan, Workload
from kvrelay.load.runner import LoadRunner
from kvrelay.load.stream import RequestFailed, run

_READY = b"ready\n"
_BEGIN_S = 0.05
"""Delay from the start signal to the first request: every child must have read the signal by then."""
_WRITE_EVERY_S = 0.5
_MAX_LINE_BYTES = 2**30

Tick = Callable[[RequestOutcome], None]
"""Called for every outcome as it arrives."""


class LoadFailed(KvRelayError):
    """The run could not be carried out."""


class LoadRun(NamedTuple):
    """All outcomes of a run by job number; if `interrupted` by Ctrl-C, those so far."""

    outcomes: list[RequestOutcome]
    interrupted: bool


def run_load(plan: LoadPlan, workload: Workload, tick: Tick) -> LoadRun:
    """Warm up and run.

    Raises: LoadFailed if the warm-up or a process failed.
    """
    outcomes: list[RequestOutcome] = []

    def take(outcome: RequestOutcome) -> None:
        outcomes.append(outcome)
        tick(outcome)

    try:
        run(_warm_up(plan, workload))
    except RequestFailed as error:
        raise LoadFailed(str(error)) from error
    interrupted = False
    try:
        if plan.processes == 1:
            run(LoadRunner(plan, workload, 0, take).run(time.perf_counter()))
        else:
            run(_on_children(plan, take))
    except KeyboardInterrupt:  # the first one ends the run but keeps the report
        interrupted = True
    return LoadRun(sorted(outcomes, key=lambda outcome: outcome.number), interrupted)


async def _warm_up(plan: LoadPlan, workload: Workload) -> None:
    if plan.warmup:
        await LoadRunner(plan, workload, 0, lambda outcome: None).warm_up()


async def _on_children(plan: LoadPlan, take: Tick) -> None:
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
        codes = await asyncio.gather(*(_collect(child, take) for child in children))
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


async def _collect(child: Process, take: Tick) -> int:
    async for line in _output(child):
        take(RequestOutcome(**json.loads(line)))
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
        self._lines.append(json.dumps(outcome.as_json()) + "\n")
        if time.perf_counter() - self._written_s > _WRITE_EVERY_S:
            self.flush()

    def flush(self) -> None:
        sys.stdout.write("".join(self._lines))
        sys.stdout.flush()
        self._lines.clear()
        self._written_s = time.perf_counter()


def _main() -> None:
    message: dict[str, Any] = json.loads(sys.stdin.readline())
    plan = LoadPlan(**message["plan"])
    writer = _Writer()
    workload = Workload(plan)
    sys.stdout.write(_READY.decode())
    sys.stdout.flush()
    start = sys.stdin.readline()
    if start:
        run(LoadRunner(plan, workload, message["process"], writer.take).run(float(start)))
        writer.flush()


if __name__ == "__main__":
    _main()
