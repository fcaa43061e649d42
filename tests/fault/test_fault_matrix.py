"""Every process of a cluster killed, stopped, restarted and cut off in every phase of sixteen streams.

Whatever happens, each stream's text, tokens, log-probabilities, usage and finish reason are those of a run without a
fault. Clients of a router that dies retry; no other client notices more than a pause. `make test` runs cells with
every target, every fault and every moment; `make test-faults` runs every cell, with TEST_FAULTS=rest only those that the
file of results does not list as passed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from support.fault_cells import Cell, Fault, Moment, Target
from support.fault_run import read_results, record, run_cell, run_streams
from support.fault_services import HOSTS, RANK_HOSTS, ROUTERS
from support.fault_streams import GRAMMARS, NEW_TOKENS, Answer, Body, add_stops, bodies, difference
from support.fault_system import FaultSystem, fault_system
from support.network_hosts import Network, why_not
from support.oracle import TINY, make_tiny, piece, save_spaced_tokenizer

MODEL = "qwen2"
NO_NETWORK = why_not()

ALL = [Cell(target, fault, moment) for target in Target for fault in Fault for moment in Moment]


COVERING = [
    Cell(target, fault, moment) for target, fault, moment in zip(Target, itertools.cycle(Fault), Moment, strict=False)
]
"""Every target, every fault and every moment, in six cells."""
PAIRS = [
    Cell(target, list(Fault)[(t + m) % 4], moment) for t, target in enumerate(Target) for m, moment in enumerate(Moment)
]
"""Every (target, fault), every (target, moment) and every (fault, moment), in 36 cells."""


def cells() -> list[Any]:
    """All cells, those that cover most first; with TEST_FAULTS=rest without those that have passed."""
    passed: set[tuple[str, str, str]] = set()
    if os.environ.get("TEST_FAULTS") == "rest":
        passed = {where for where, result in read_results().items() if not result["problem"]}
    rest = [cell for cell in ALL if cell not in COVERING and (cell.target, cell.fault, cell.moment) not in passed]
    # Nodes of two ranks last: they take longest to come back.
    rest.sort(key=lambda cell: (cell not in PAIRS, cell.ends_node and cell.service in RANK_HOSTS))
    return [*COVERING, *(pytest.param(cell, marks=pytest.mark.thorough) for cell in rest)]


@dataclass
class Served:
    """The running system and what it answers when nothing is hurt."""

    system: FaultSystem
    made: list[Body]
    expected: list[Answer]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Instead of the check of that name: here processes give way to others. `fault_system` sees to it that all end."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("faults")
    model = make_tiny(MODEL, folder / MODEL)
    vocab_size = TINY[MODEL].vocab_size
    save_spaced_tokenizer(model, vocab_size)
    network = None if NO_NETWORK else Network(*HOSTS)
    if network is None:
        with fault_system(folder, model, None) as system:
            yield _reference(system, vocab_size)
    else:
        with network, fault_system(folder, model, network) as system:
            yield _reference(system, vocab_size)


def _reference(system: FaultSystem, vocab_size: int) -> Served:
    plain = bodies(vocab_size, MODEL)
    free = [stream.answer for stream in asyncio.run(run_streams(system, plain, "free"))]
    made = add_stops(plain, free, [piece(token_id) for token_id in range(vocab_size)])
    streams = asyncio.run(run_streams(system, made, "reference"))
    assert not any(stream.repeats for stream in streams), [stream.errors for stream in streams]
    assert {stream.prefill_node for stream in streams} == {"prefill-0", "prefill-1"}, "both serve, by relay"
    assert {stream.decode_node for stream in streams} == {"decode-0", "decode-1"}
    assert sum(system.metric(router, "kvrelay_relayed_bytes_total") for router in ROUTERS) > 0
    assert {stream.answer.finish_reason for stream in streams} == {"stop", "length"}
    for n, regex in GRAMMARS.items():
        words = streams[n].answer.text
        found = re.match(regex.replace("{200}", "+"), words)
        assert found is not None, words
        assert found.end() > len(words) - 20, words[found.end() :]  # the last repetition may be cut
        assert len(streams[n].answer.tokens) >= NEW_TOKENS - 2
    system.wait_whole()
    return Served(system, made, [stream.answer for stream in streams])


def test_two_runs_without_a_fault_are_the_same(served: Served) -> None:
    again = asyncio.run(run_streams(served.system, served.made, "again"))
    for expected, stream in zip(served.expected, again, strict=True):
        assert not difference(expected, stream.answer)
    served.system.wait_whole()


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_streams_are_the_same_whatever_is_hurt(served: Served, cell: Cell) -> None:
    if cell.fault is Fault.CUT and NO_NETWORK is not None:
        pytest.skip(f"network cuts: {NO_NETWORK}")
    result = run_cell(served.system, cell, served.made, served.expected)
    record(result)
    print(f"{cell}: {result}")
    assert not result.problem, f"{result.problem}\n{served.system.log_tail()}"


@pytest.mark.parametrize(
    "cell",
    [
        Cell(Target.PREFILL_LEADER, Fault.STOP, Moment.MID_RELAY),
        Cell(Target.DECODE_LEADER, Fault.STOP, Moment.MID_DECODE),
    ],
    ids=str,
)
def test_a_node_that_stood_still_corrupts_nothing_and_is_used_again(served: Served, cell: Cell) -> None:
    """Its late messages about attempts that continued elsewhere are dropped; its blocks become free again."""
    system = served.system
    for _ in range(5):  # the other node may have got all of the requests, or this one ended them before it was stopped
        result = run_cell(system, cell, served.made, served.expected)
        assert not result.problem, f"{result.problem}\n{system.log_tail()}"
        if result.retried:
            break
    else:
        pytest.fail("nobody missed it, five times")
    streams = asyncio.run(run_streams(system, served.made, f"after {cell}"))
    for expected, stream in zip(served.expected, streams, strict=True):
        assert not difference(expected, stream.answer)
    assert cell.service in {stream.prefill_node for stream in streams} | {stream.decode_node for stream in streams}
    system.wait_whole()


def test_every_process_listens_on_its_own_address_only(served: Served) -> None:
    """Also the sockets that libraries open: stores, collectives, data planes."""
    for service in served.system.services.values():
        process = psutil.Process(service.pid)
        for each in (process, *process.children(recursive=True)):
            listening = {
                connection.laddr.ip for connection in each.net_connections("inet") if connection.status == "LISTEN"
            }
            assert not listening & {"0.0.0.0", "::"}, f"{service.name} ({each.cmdline()[2:5]}): {listening}"
