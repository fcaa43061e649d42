"""One cell of the fault matrix: who is hurt, how, in which moment of the streams; and what must be true afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fault_streams import Answer, Body, Crowd, Stream, difference, make_streams, salted
from fault_system import LEASE_S, NODES, RANK_HOSTS, ROUTERS, FaultSystem
from system import wait_until

from common.protocol import NodeLoad

RUN_S = 60.0
"""No run may take longer, whatever happens in it."""
STOP_S = 10.0
CUT_S = 6.0
"""Longer than the lease and than the silence after which a connection counts as broken."""
RELAY_MBIT_S = {"prefill-0": 6.0, "prefill-1": 50.0, "pre-1b": 50.0}
"""What the prefill nodes' hosts may send in mid-relay cells, so that relays take a second or two. Between the hosts of
the node with two ranks the sums of every layer travel, too."""
_MID_RELAY_BYTES = {"prefill-0": 300_000, "pre-1b": 3_000_000}
"""When so much has been sent, relays are under way."""
_INDEX_SLACK_S = 1.5
_WAIT_FOR_MOMENT_S = 20.0


class Target(StrEnum):
    PREFILL_LEADER = "prefill leader"
    PREFILL_RANK = "prefill rank"
    DECODE_LEADER = "decode leader"
    DECODE_RANK = "decode rank"
    ROUTER = "router"
    REDIS = "Redis"


class Fault(StrEnum):
    KILL = "SIGKILL"
    STOP = "SIGSTOP 10 s"
    RESTART = "restart"
    CUT = "network cut"


class Moment(StrEnum):
    QUEUED = "queued"
    MID_PREFILL = "mid-prefill"
    MID_RELAY = "mid-relay"
    FIRST_TOKEN = "first token"
    MID_DECODE = "mid-decode"
    LAST_TOKEN = "last token"


@dataclass(frozen=True)
class Cell:
    target: Target
    fault: Fault
    moment: Moment

    def __str__(self) -> str:
        return "-".join(part.value.replace(" ", "_") for part in (self.target, self.fault, self.moment))

    @property
    def service(self) -> str:
        """Whose process (or rank) is hurt. Leaders by turns of the node with one rank and of that with two."""
        if self.target is Target.REDIS:
            return "redis"
        if self.target is Target.ROUTER:
            return "router-0"
        role, what = self.target.value.split(" ")
        single = what == "leader" and list(Moment).index(self.moment) % 2 == 0
        return f"{role}-{0 if single else 1}"

    @property
    def ends_node(self) -> bool:
        """Whether a node dies of it. Ranks share fate: no node of two survives the silence of one."""
        return self.service in NODES and (self.fault in (Fault.KILL, Fault.RESTART) or self.service in RANK_HOSTS)

    @property
    def breaks_connections(self) -> bool:
        """Whether clients of the router must ask again. Everybody else may only notice a pause."""
        return self.target is Target.ROUTER and self.fault in (Fault.KILL, Fault.RESTART)


@dataclass(frozen=True)
class Result:
    """What one cell showed."""

    target: str
    service: str
    fault: str
    moment: str
    unfinished: int
    """Streams that were not over when the fault came."""
    retried: float
    """Attempts beyond the first, all streams together."""
    repeats: int
    """Requests that clients had to send again."""
    longest_gap_s: float
    """From the fault on: the longest time in which one of the streams got nothing."""
    wall_s: float
    worst: str = ""
    """The stream with that gap."""
    problem: str = ""


# ---------------------------------------------------------------- the moment


class Watch:
    """Finds out when the streams of one run are in a phase."""

    def __init__(self, system: FaultSystem, crowd: Crowd, expected: list[Answer], cell: Cell) -> None:
        self._system = system
        self._crowd = crowd
        self._lengths = [len(answer.tokens) for answer in expected]
        self._cell = cell
        self._before = {node: system.load(node) for node in NODES}
        self._sent_before = self._sent_bytes()

    async def wait(self) -> None:
        """Until the moment has come. Raises: AssertionError if it never does."""
        end = time.monotonic() + _WAIT_FOR_MOMENT_S
        by_client = self._cell.moment in (Moment.FIRST_TOKEN, Moment.MID_DECODE, Moment.LAST_TOKEN)
        while not (self._streams_are_there() if by_client else await asyncio.to_thread(self._nodes_are_there)):
            assert time.monotonic() < end, f"no stream was ever {self._cell.moment}"
            if any(stream.answer.done for stream in self._crowd.streams) and not by_client:
                return  # it was too short to be seen; the table shows what was hurt instead
            self._crowd.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._crowd.changed.wait(), None if by_client else 0.005)

    def _streams_are_there(self) -> bool:
        role = self._cell.service.partition("-")[0]
        progress = [
            (len(stream.answer.tokens), length)
            for stream, length in zip(self._crowd.streams, self._lengths, strict=True)
            if (role != "decode" or stream.decode_node == self._cell.service)
            and (role != "router" or stream.router == self._cell.service)
            and length > 1
        ]
        match self._cell.moment:
            case Moment.FIRST_TOKEN:
                return any(0 < got < length for got, length in progress)
            case Moment.MID_DECODE:
                return sum(length * 0.3 <= got < length for got, length in progress) >= 2
            case _:
                return any(length - 2 <= got < length for got, length in progress)

    def _nodes_are_there(self) -> bool:
        role = self._cell.service.partition("-")[0]
        wanted = [self._cell.service] if role == "prefill" else ["prefill-0", "prefill-1"]
        loads = [(load, self._before[node]) for node in wanted if (load := self._system.load(node)) is not None]
        match self._cell.moment:
            case Moment.QUEUED:
                return any(load.waiting >= 1 for load, _ in loads)
            case Moment.MID_PREFILL:
                return any(_computed(load, before) >= 300 and load.queued_tokens >= 300 for load, before in loads)
            case _:
                if self._system.network is not None:
                    return self._sent_bytes() - self._sent_before > _MID_RELAY_BYTES[self._relaying]
                load = self._system.load("decode-0")
                return load is not None and load.kv_blocks_used > 0

    def _sent_bytes(self) -> int:
        return 0 if self._system.network is None else self._system.host(self._relaying).sent_bytes()

    @property
    def _relaying(self) -> str:
        """The host whose traffic is watched."""
        return "pre-1b" if self._cell.service == "prefill-1" else "prefill-0"


def _computed(load: NodeLoad, before: NodeLoad | None) -> int:
    return load.prompt_tokens - (0 if before is None else before.prompt_tokens)


# ---------------------------------------------------------------- the fault


async def strike(system: FaultSystem, cell: Cell) -> None:
    """Do it, and end what ends by itself: a pause, a cut; bring back what is to restart at once."""
    name = cell.service
    is_rank = cell.target in (Target.PREFILL_RANK, Target.DECODE_RANK)
    pid = system.rank_pid(name) if is_rank else system.services[name].pid
    match cell.fault:
        case Fault.KILL:
            system.kill(pid)
        case Fault.STOP:
            system.stop(pid)
            await asyncio.sleep(STOP_S)
            system.go_on()
        case Fault.RESTART:
            os.kill(pid, signal.SIGTERM)
            if name in NODES:
                await asyncio.to_thread(system.wait_ended, name)
                for part in system.parts(name):
                    system.start(part.name)
            else:
                await asyncio.to_thread(wait_until, lambda: not system.services[name].alive, 20, f"{name} ended")
                system.start(name)
        case Fault.CUT:
            host = RANK_HOSTS[name] if is_rank else name
            system.cut(host)
            await asyncio.sleep(CUT_S)
            system.mend()


# ---------------------------------------------------------------- one run


async def run_streams(system: FaultSystem, made: list[Body], salt: str) -> list[Stream]:
    """All requests at once, nothing hurt."""
    crowd = Crowd(make_streams(salted(made, salt), ROUTERS), system.urls, timeout_s=RUN_S)
    await crowd.run()
    return crowd.streams


async def _run_cell(
    system: FaultSystem, cell: Cell, made: list[Body], expected: list[Answer]
) -> tuple[Crowd, int, float]:
    """The streams, how many of them were not over when the fault came, and when that was."""
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
    """Run the streams, strike, and check everything that must hold afterwards; the system is whole again then.

    The result's `problem` says what did not hold.
    """
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
        system.renew()  # the next cell is another matter
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
    """Until neither Redis nor any router's index knows a block of a dead incarnation. Raises: AssertionError."""
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
    """Of counters; that of a router which began anew counts from zero."""
    return sum(now[router] - (before[router] if now[router] >= before[router] else 0.0) for router in ROUTERS)


def _metric(system: FaultSystem, router: str) -> float:
    with contextlib.suppress(Exception):  # it may just be down
        return system.metric(router, "kvrelay_retries_total")
    return 0.0


def _results_file() -> Path | None:
    path = os.environ.get("FAULT_RESULTS")
    return Path(path) if path else None


def record(result: Result) -> None:
    """Append to the file that `scripts/test-faults` makes its table of."""
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
