"""Cost of the router's index and decisions as a function of size. The router's own code, in one process per size.

Times are processor times, so that other processes on the machine are not measured.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bench.results import Result, Target, median, percentile
from bench.worker import Worker

from common.base.hashing import HASH_BYTES
from router.index.prefix_hits import PrefixHits
from router.index.prefix_index import Hashes, PrefixIndex
from router.policy import POLICIES, Fleet, Memory, Query, Routing, place

_NODES = 100
_BATCH = 512
"""Hashes of an event."""
_PROMPT_BLOCKS = 8192
_GIB = 2**30


class IndexBench:
    """An index of `blocks` blocks, built here."""

    def __init__(self, blocks: int) -> None:
        process = psutil.Process(os.getpid())
        self._rng = np.random.default_rng(1)
        names = [f"node-{i}-{'x' * 16}" for i in range(_NODES)]
        self._index = PrefixIndex(max_blocks=2 * blocks)
        prompt = self._hashes(_PROMPT_BLOCKS)
        before = process.memory_info().rss
        spent = events = self._longest_s = 0.0
        remaining = blocks
        turn = 0
        while remaining > 0:
            blob = self._hashes(min(_BATCH, remaining))
            began = time.thread_time()
            self._index.stored(names[turn % _NODES], blob)
            took_s = time.thread_time() - began
            if turn:  # the very first one loads code
                self._longest_s = max(self._longest_s, took_s)
            spent += took_s
            events += len(blob) // HASH_BYTES
            remaining -= _BATCH
            turn += 1
        self._rss = process.memory_info().rss - before
        self._stored_per_s = events / spent
        for name, share in (("long", 1.0), ("half", 0.5), ("short", 0.1)):
            self._index.stored(name, prompt[: int(share * _PROMPT_BLOCKS) * HASH_BYTES])
        self._prompt = prompt
        self._names = names
        self._blocks = blocks

    def _hashes(self, count: int) -> bytes:
        return self._rng.bytes(count * HASH_BYTES)

    def measure(self) -> dict[str, float]:
        """Figures of this size."""
        blocks = [self._prompt[i : i + HASH_BYTES] for i in range(0, len(self._prompt), HASH_BYTES)]
        times, found = self._match_times(blocks)
        assert found["long"] == _PROMPT_BLOCKS, found
        only_expected = self._hashes(_PROMPT_BLOCKS)
        self._index.expect("expected", only_expected)
        expected_times, found = self._match_times(only_expected)
        assert found == {"expected": _PROMPT_BLOCKS}, found
        events, spent = 0, 0.0
        for turn in range(200):
            blob = self._hashes(_BATCH)
            name = self._names[turn % _NODES]
            began = time.thread_time()
            self._index.stored(name, blob)
            self._index.removed(name, blob)
            spent += time.thread_time() - began
            events += 2 * _BATCH
        return {
            "bytes_per_block": self._rss / self._blocks,
            "gib": self._rss / _GIB,
            "stored_per_s": self._stored_per_s,
            "mixed_events_per_s": events / spent,
            "match_ms": 1e3 * median(times),
            "match_p99_ms": 1e3 * percentile(times, 0.99),
            "match_expected_ms": 1e3 * median(expected_times),
            "longest_stored_ms": 1e3 * self._longest_s,
        }

    def _match_times(self, blocks: Hashes) -> tuple[list[float], PrefixHits]:
        times: list[float] = []
        for _ in range(30):
            began = time.thread_time()
            self._index.match(blocks)
            times.append(time.thread_time() - began)
        return times, self._index.match(blocks)


def index(quick: bool, picture: Path) -> Result:
    """Bytes, events/s and look-up time at growing sizes; drawn into `picture`."""
    result = Result("index")
    sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000, 10_000_000)
    for size in sizes:
        worker = Worker("bench.router_brain:IndexBench", blocks=size)
        try:
            found: dict[str, float] = worker.call("measure")
        finally:
            worker.close()
        largest = size == sizes[-1]
        name = f"{size:,} blocks"
        result.add(f"{name}: memory", found["gib"], "GiB", target=Target(2e9 / _GIB, at_most=True) if largest else None,
                   note=f"{found['bytes_per_block']:.0f} bytes per block")  # fmt: skip
        result.add(f"{name}: look-up of {_PROMPT_BLOCKS:,} blocks", found["match_ms"], "ms",
                   target=Target(5, at_most=True), note=f"p99 {found['match_p99_ms']:.2f} ms")  # fmt: skip
        result.add(f"{name}: look-up of as many that are only expected", found["match_expected_ms"], "ms",
                   target=Target(5, at_most=True))  # fmt: skip
        result.add(f"{name}: longest batch stored on the way there", found["longest_stored_ms"], "ms",
                   note=f"{_BATCH} blocks")  # fmt: skip
        result.add(f"{name}: events stored", found["stored_per_s"], "/s", target=Target(400_000))
        result.add(f"{name}: events stored and removed", found["mixed_events_per_s"], "/s", target=Target(400_000))
        result.details[name] = found
    _plot(sizes, list(result.details.values()), picture)
    return result


def _plot(sizes: Sequence[int], found: Sequence[dict[str, float]], picture: Path) -> None:
    """Cost per block over size; a flat line means a linear total cost."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4.2), layout="constrained")).add_subplot()
    curves: dict[str, list[float]] = {
        "look-up, us per block": [1e3 * each["match_ms"] / _PROMPT_BLOCKS for each in found],
        "event, us": [1e6 / each["mixed_events_per_s"] for each in found],
        "memory, 100 bytes per block": [each["bytes_per_block"] / 100 for each in found],
    }
    for label, values in curves.items():
        axes.plot(sizes, values, "o-", label=label)
    axes.set(xscale="log", yscale="log", xlabel="blocks in the index", ylabel="cost per block (flat: linear in all)")
    axes.grid(alpha=0.3)
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)


def decisions(quick: bool) -> Result:
    """Time of one placement over 10 to 1,000 nodes, half of each role."""
    result = Result("decisions")
    for policy in ("kv_aware", "least_load"):
        for nodes in (10, 100, 1000):
            times = _decision_s(policy, nodes // 2, 30 if quick else 300)
            target = Target(2, at_most=True) if nodes == 1000 else None
            note = f"p99 {1e3 * percentile(times, 0.99):.2f} ms"
            result.add(f"{policy} over {nodes:,} nodes", 1e3 * median(times), "ms", target=target, note=note)
    return result


def _decision_s(policy: str, per_role: int, repeats: int) -> list[float]:
    rng = random.Random(4)
    fleets = {}
    for role in ("prefill", "decode"):
        fleet = fleets[role] = Fleet(role)
        for i in range(per_role):
            values: dict[str, Any] = {"waiting": rng.randrange(4), "running": rng.randrange(30), "token_bytes": 1e5}
            values |= {"queued_tokens": rng.randrange(9000), "free_blocks": 5000, "total_blocks": 9000}
            fleet.add(f"{role}-{i}", f"{role}-{i}", **values)
    names = [name for fleet in fleets.values() for name in fleet.incarnations]
    memory, times = Memory(random.Random(1)), []
    for _ in range(repeats + 5):
        hits = {name: rng.randrange(1, 400) for name in rng.sample(names, len(names) // 2)}
        query = Query(8000, hits=hits, max_new_tokens=300, session=str(rng.random()))
        began = time.thread_time()
        decision = place(query, fleets["prefill"], fleets["decode"], Routing(POLICIES[policy], 0, memory))
        times.append(time.thread_time() - began)
        fleets["decode"].sent(decision.decode.incarnation, tokens=0, blocks=500)
    return times[5:]
