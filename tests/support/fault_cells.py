"""The cells of the fault matrix: which process, which fault, in which phase of the streams. Checks are in `fault_run`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum

from support.fault_services import NODES, RANK_HOSTS
from support.fault_streams import Answer, Crowd
from support.fault_system import FaultSystem
from support.system import wait_until

from common.control.messages import NodeLoad

STOP_S = 10.0
CUT_S = 6.0
"""Longer than the lease and longer than the silence after which a connection counts as broken."""
RELAY_MBIT_S = {"prefill-0": 6.0, "prefill-1": 50.0, "pre-1b": 50.0}
"""Send rate of the prefill nodes' hosts in mid-relay cells, so that relays take a second or two. The node with two ranks
also sends its all-reduces between its hosts."""
_MID_RELAY_BYTES = {"prefill-0": 300_000, "pre-1b": 3_000_000}
"""Once this much has been sent, relays are under way."""
_MID_DECODE_TOKENS = 60
"""Once a decode node has generated this many, its streams are in the middle."""
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
        """The service whose process (or rank) gets the fault. Leaders are in turn those of the node with one rank and of the
        node with two."""
        if self.target is Target.REDIS:
            return "redis"
        if self.target is Target.ROUTER:
            return "router-0"
        role, what = self.target.value.split(" ")
        single = what == "leader" and list(Moment).index(self.moment) % 2 == 0
        return f"{role}-{0 if single else 1}"

    @property
    def ends_node(self) -> bool:
        """Whether a node ends because of the fault. Ranks share fate: a node with two ranks ends when one is silent."""
        return self.service in NODES and (self.fault in (Fault.KILL, Fault.RESTART) or self.service in RANK_HOSTS)

    @property
    def breaks_connections(self) -> bool:
        """Whether clients of the router must retry. All other clients may notice only a pause."""
        return self.target is Target.ROUTER and self.fault in (Fault.KILL, Fault.RESTART)


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
        """Wait until the phase is reached. Raises: AssertionError if it never is."""
        end = time.monotonic() + _WAIT_FOR_MOMENT_S
        by_client = self._cell.moment in (Moment.FIRST_TOKEN, Moment.LAST_TOKEN) or (
            self._cell.moment is Moment.MID_DECODE
            and self._cell.target not in (Target.DECODE_LEADER, Target.DECODE_RANK)
        )
        ends_with_all = by_client or self._cell.moment is Moment.MID_DECODE
        while not (self._streams_are_there() if by_client else await asyncio.to_thread(self._nodes_are_there)):
            assert time.monotonic() < end, f"no stream was ever {self._cell.moment}"
            done = [stream.answer.done for stream in self._crowd.streams]
            if all(done) if ends_with_all else any(done):
                return  # the phase was too short to be observed; the table shows which one was hit instead
            self._crowd.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._crowd.changed.wait(), 0.5 if by_client else 0.005)

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
            case Moment.MID_DECODE:
                # The node itself is asked: on busy cores clients read tokens after the node has generated all of them.
                load, before = self._system.load(self._cell.service), self._before[self._cell.service]
                return load is not None and load.running >= 2 and _generated(load, before) >= _MID_DECODE_TOKENS
            case _:
                if self._system.network is not None:
                    return self._sent_bytes() - self._sent_before > _MID_RELAY_BYTES[self._relaying]
                load = self._system.load(self._cell.service if self._cell.service in NODES else "decode-0")
                return load is not None and load.kv_blocks_used > 0

    def _sent_bytes(self) -> int:
        return 0 if self._system.network is None else self._system.host(self._relaying).sent_bytes()

    @property
    def _relaying(self) -> str:
        """The host whose traffic is watched."""
        return "pre-1b" if self._cell.service == "prefill-1" else "prefill-0"


def _computed(load: NodeLoad, before: NodeLoad | None) -> int:
    return load.prompt_tokens - (0 if before is None else before.prompt_tokens)


def _generated(load: NodeLoad, before: NodeLoad | None) -> int:
    return load.generated_tokens - (0 if before is None else before.generated_tokens)


# ---------------------------------------------------------------- the fault


async def strike(system: FaultSystem, cell: Cell) -> None:
    """Inject the fault. Ends temporary faults (a pause, a cut) and restarts at once what the fault restarts."""
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
