"""The prefix index at growing sizes: memory, look-up, ingestion, and the longest stall after a node's death.

    python tests/load/bench_index.py [--json] [--sizes 1000,100000] [--plot FILE]

Seconds are of this thread's processor time, so that neighbours do not count. One process, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from common.hashing import HASH_BYTES
from router.index import PrefixIndex

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
PROMPT_BLOCKS = 8192
"""A prompt of 128k tokens."""
BATCH_BLOCKS = 256
NODES = 100
_REPEATS = 20
_EVENTS = 200_000


def measure(sizes: tuple[int, ...] = SIZES) -> list[dict[str, float]]:
    """One sample per size, of one index that grows. Times in seconds, memory in bytes."""
    before = _resident_bytes()
    index = PrefixIndex(max(sizes) * 11 // 10 + _EVENTS + _REPEATS * PROMPT_BLOCKS)  # never full
    samples: list[dict[str, float]] = []
    for size in sorted(sizes):
        ingest_s, longest_s, added = 0.0, 0.0, 0
        while len(index) < size:
            blob = os.urandom(HASH_BYTES * min(BATCH_BLOCKS, size - len(index)))
            node = f"node-{added // BATCH_BLOCKS % NODES}"
            took_s = _timed(lambda node=node, blob=blob: index.stored(node, blob))
            ingest_s, longest_s, added = ingest_s + took_s, max(longest_s, took_s), added + len(blob) // HASH_BYTES
        sample = {
            "blocks": float(len(index)),
            "bytes_per_block": (_resident_bytes() - before) / len(index),
            "bytes": float(_resident_bytes() - before),
            "stored_per_s": added / ingest_s,
            "longest_stored_s": longest_s,
        }
        samples.append(sample | _events(index) | _match(index, min(PROMPT_BLOCKS, size)) | _drop(index))
    return samples


def _timed(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def _events(index: PrefixIndex) -> dict[str, float]:
    """As many blocks come as go: a fleet whose caches are full."""
    blobs = [os.urandom(HASH_BYTES * BATCH_BLOCKS) for _ in range(_EVENTS // 2 // BATCH_BLOCKS)]
    took_s = 0.0
    for number, blob in enumerate(blobs):
        took_s += _timed(lambda number=number, blob=blob: index.stored(f"node-{number % NODES}", blob))
    for number, blob in enumerate(blobs):
        took_s += _timed(lambda number=number, blob=blob: index.removed(f"node-{number % NODES}", blob))
    return {"events_per_s": 2 * len(blobs) * BATCH_BLOCKS / took_s}


def _match(index: PrefixIndex, blocks: int) -> dict[str, float]:
    """A prompt that one node holds whole, one half, and all others the first block of."""
    prompts = [os.urandom(HASH_BYTES * blocks) for _ in range(_REPEATS)]
    for prompt in prompts:
        index.stored("whole", prompt)
        index.stored("half", prompt[: len(prompt) // 2])
        for node in range(NODES):
            index.stored(f"node-{node}", prompt[:HASH_BYTES])
    times = sorted(_timed(lambda prompt=prompt: index.match(prompt)) for prompt in prompts)
    assert index.match(prompts[0])["whole"] == blocks
    for prompt in prompts:
        for holder in ("whole", "half", *(f"node-{node}" for node in range(NODES))):
            index.removed(holder, prompt)
    return {"match_blocks": float(blocks), "match_s": times[len(times) // 2], "match_worst_s": times[-1]}


def _drop(index: PrefixIndex) -> dict[str, float]:
    """A node with one percent of the blocks dies."""
    blob = os.urandom(HASH_BYTES * max(1, len(index) // 100))
    index.stored("dying", blob)
    longest_s = _timed(lambda: index.drop("dying"))
    total_s = 0.0
    more = True
    while more:
        started_s = time.thread_time()
        more = index.tidy()
        took_s = time.thread_time() - started_s
        longest_s, total_s = max(longest_s, took_s), total_s + took_s
    return {"longest_stall_after_death_s": longest_s, "clean_up_s": total_s}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def plot(samples: list[dict[str, float]], path: Path) -> bool:
    """Draw cost against size. Returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    sizes = [sample["blocks"] for sample in samples]
    curves: dict[str, list[float]] = {
        "look-up, us per block": [1e6 * s["match_s"] / s["match_blocks"] for s in samples],
        "event, us": [1e6 / s["events_per_s"] for s in samples],
        "memory, 100 bytes per block": [s["bytes_per_block"] / 100 for s in samples],
    }
    for name, values in curves.items():
        axes.plot(sizes, values, "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="blocks in the index", ylabel="cost per block (flat: linear in all)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--plot", type=Path)
    options: Any = parser.parse_args()
    samples = measure(tuple(int(size) for size in options.sizes.split(",")))
    if options.plot is not None:
        plot(samples, options.plot)
    if options.json:
        print(json.dumps(samples))
        return
    for s in samples:
        print(
            f"{s['blocks']:>12,.0f} blocks: {s['bytes_per_block']:.0f} B each, {s['bytes'] / 1e6:,.0f} MB; look-up of "
            f"{s['match_blocks']:.0f}: {1e3 * s['match_s']:.2f} ms (worst {1e3 * s['match_worst_s']:.2f}); "
            f"{s['stored_per_s']:,.0f} stored/s, {s['events_per_s']:,.0f} events/s; longest stall "
            f"{1e3 * max(s['longest_stored_s'], s['longest_stall_after_death_s']):.1f} ms"
        )


if __name__ == "__main__":
    main()
