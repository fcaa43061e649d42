"""Runs one cell of the fault matrix, checks the state afterwards, and stores the results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.fault_cells import RELAY_MBIT_S, Cell, Fault, Moment, Watch, strike
from support.fault_services import LEASE_S, NODES, ROUTERS
from support.fault_streams import Answer, Body, Crowd, Stream, difference, make_streams, salted
from support.fault_system import FaultSystem

RUN_S = 60.0
"""Maximum duration of a run."""
_INDEX_SLACK_S = 1.5


@dataclass(frozen=True)
class Result:
    """Result of one cell."""

    target: str
    service: str
    fault: str
    moment: str
    unfinished: int
    """Streams that were running when the fault occurred."""
    retried: float
    """Attempts beyond the first, summed over all streams."""
    repeats: int
    """Requests that clients had to send again."""
    longest_gap_s: float
    """The longest time after the fault in which one of the streams received nothing."""
    wall_s: float
    worst: str = ""
    """The stream with that gap."""
    problem: str = ""


async def run_streams(system: FaultSystem, made: list[Body], salt: str) -> list[Stream]:
    """All requests at once, without a fault."""
    crowd = Crowd(make_streams(salted(made, salt), ROUTERS), system.urls, timeout_s=RUN_S)
    await crowd.run()
    return crowd.streams


async def _run_cell(
    system: FaultSystem, cell: Cell, made: list[Body], expected: list[Answer]
) -> tuple[Crowd, int, float]:
    """The streams, how many of them were running when the fault occurred, and when that was."""
    crowd = Crowd(make_streams(salted(made, secrets.token_hex(4)), ROUTERS), system.urls, timeout_s=RUN_S)
    watch = Watch(system, crowd, expected, cell)
    running = asyncio.create_task(crowd.run())
    waiting = asyncio.create_task(watch.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    await waiting
    unfinished = sum(not stream.answer.done for stream in crowd.streams)
    struck_s, struck = time.monotonic(), asyncio.create_task(strike(system, cell))
    try:
        await running
        await struck
    finally:
        for task in (running, struck):
            task.cancel()
        await asyncio.gather(running, struck, return_exceptions=True)
    return crowd, unfinished, struck_s


def run_cell(system: FaultSystem, cell: Cell, made: list[Body], expected: list[Answer]) -> Result:
    """Run the streams, inject the fault, and check everything that must hold; returns with the system repaired.

    The result's `problem` says what did not hold. Raises: whatever kept it from being found out.
    """
    try:
        return _checked(system, cell, made, expected)
    except BaseException:
        system.renew()  # so that this failure does not affect the next cell
        raise


def _checked(system: FaultSystem, cell: Cell, made: list[Body], expected: list[Answer]) -> Result:
    old = system.incarnation(cell.service) if cell.service in NODES else ""
    retries_before = _retries(system)
    if cell.moment is Moment.MID_RELAY:
        system.slow_down(RELAY_MBIT_S)
    start_s = time.monotonic()
    crowd, unfinished, struck_s = asyncio.run(_run_cell(system, cell, made, expected))
    problems = [
        f"stream {n}: {found}; its client saw {stream.errors}"
        for n, (stream, answer) in enumerate(zip(crowd.streams, expected, strict=True))
        if (found := difference(answer, stream.answer, asked_again=stream.repeats > 0))
    ]
    problems += [
        f"stream {n} had to be asked again: {stream.errors}"
        for n, stream in enumerate(crowd.streams)
        if stream.repeats and not (cell.breaks_connections and stream.router == cell.service)
    ]
    hurt_later = cell.ends_node and cell.fault is not Fault.RESTART
    if cell.ends_node:
        if hurt_later:
            system.wait_ended(cell.service)
        # A node that is killed is dead at once; in the other cases it lives on for a moment and may still renew its lease.
        dead_s = struck_s if len(system.parts(cell.service)) == 1 and cell.fault is Fault.KILL else time.monotonic()
        problems += _complaint(lambda: _wait_forgotten(system, old, dead_s + LEASE_S + _INDEX_SLACK_S))
    retried = _growth(retries_before, _retries(system))
    system.heal()
    if cell.service in NODES and (system.incarnation(cell.service) == old) == cell.ends_node:
        problems.append(f"{cell.service} has incarnation {system.incarnation(cell.service)}, before it had {old}")
    not_whole = _complaint(system.wait_whole)
    problems += _complaint(lambda: _wait_forgotten(system, "", time.monotonic() + LEASE_S))
    if not_whole:
        system.renew()
    problems += not_whole
    return Result(
        cell.target,
        cell.service,
        cell.fault,
        cell.moment,
        unfinished,
        retried,
        sum(stream.repeats for stream in crowd.streams),
        round(max(stream.longest_gap_s(struck_s) for stream in crowd.streams), 2),
        round(time.monotonic() - start_s, 1),
        _worst(crowd.streams, struck_s),
        "; ".join(problems),
    )


def _wait_forgotten(system: FaultSystem, incarnation: str, until_s: float) -> None:
    """Wait until neither Redis nor any router's index has a block of a dead incarnation. Raises: AssertionError."""
    # If the streams took longer than that, the last blocks of living nodes still need a moment to be published.
    until_s = max(until_s, time.monotonic() + _INDEX_SLACK_S)
    while True:
        complaint = (
            f"Redis still knows the dead incarnation {incarnation}"
            if incarnation in system.incarnations_in_redis()
            else system.index_complaint()
        )
        if not complaint:
            return
        assert time.monotonic() < until_s, complaint
        time.sleep(0.1)


def _worst(streams: list[Stream], struck_s: float) -> str:
    number = max(range(len(streams)), key=lambda n: streams[n].longest_gap_s(struck_s))
    stream = streams[number]
    before = sum(time_s <= struck_s for time_s in stream.times_s)
    after = [round(time_s - struck_s, 2) for time_s in stream.times_s if time_s > struck_s]
    return (
        f"stream {number} ({stream.prefill_node}, {stream.decode_node}): {before} messages before the fault, "
        f"then at {after[:3]} ... {after[-1:]} s"
    )


def _complaint(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except AssertionError as error:
        return [str(error)]
    return []


def _retries(system: FaultSystem) -> dict[str, float]:
    return {router: _metric(system, router) for router in ROUTERS}


def _growth(before: dict[str, float], now: dict[str, float]) -> float:
    """The increase of counters; the counter of a restarted router starts at zero."""
    return sum(now[router] - (before[router] if now[router] >= before[router] else 0.0) for router in ROUTERS)


def _metric(system: FaultSystem, router: str) -> float:
    with contextlib.suppress(Exception):  # the router may be down at the moment
        return system.metric(router, "kvrelay_retries_total")
    return 0.0


def _results_file() -> Path | None:
    path = os.environ.get("FAULT_RESULTS")
    return Path(path) if path else None


def record(result: Result) -> None:
    """Append to the file from which `scripts/test-faults` makes its table."""
    path = _results_file()
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def read_results(path: Path | None = None) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The last result of every cell in the file, by (target, fault, moment)."""
    path = path or _results_file()
    if path is None or not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return {(result["target"], result["fault"], result["moment"]): result for result in results}
