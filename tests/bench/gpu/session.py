"""One run of `gpu-bench`: sizes, the device, and the processes that its lines share, one at a time on the GPU."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import subprocess
import tempfile
import time
import traceback
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from bench import client
from bench.shape import SHAPES, Shape, make_model_folder
from bench.worker import ROOT, Worker, WorkerFailed
from support.system import System, running_system

RESULTS = ROOT / "bench-results"
_START_TIMEOUT_S = 240.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Sizes:
    """How much of everything; `DRY` only shows that the benchmark's own code runs."""

    big: str
    small: str
    batches: tuple[int, ...]
    """Of decode steps of the big shape, beside batch 1."""
    context: int
    steps: int
    prefill: int
    prefill_chunk: int
    repeats: int
    relay_tokens: int
    relay_transfers: int
    ttft_tokens: int
    streams: int
    stream_prompt: int
    long_prompt: int
    arrivals: int
    arrival_s: float
    peer_requests: int
    peer_prompt: int
    peer_tokens: int


FULL = Sizes(
    big="8b", small="0.5b", batches=(32, 256), context=1024, steps=50, prefill=8192, prefill_chunk=8192, repeats=5,
    relay_tokens=4096, relay_transfers=8, ttft_tokens=4096, streams=64, stream_prompt=256, long_prompt=8192, arrivals=8,
    arrival_s=1.0, peer_requests=64, peer_prompt=256, peer_tokens=256,
)  # fmt: skip
DRY = Sizes(
    big="tiny", small="tiny", batches=(2, 4), context=32, steps=3, prefill=96, prefill_chunk=64, repeats=2,
    relay_tokens=64, relay_transfers=2, ttft_tokens=96, streams=3, stream_prompt=16, long_prompt=128, arrivals=2,
    arrival_s=0.5, peer_requests=3, peer_prompt=8, peer_tokens=4,
)  # fmt: skip


@dataclass
class GpuSession:
    """Owns every process of the run. Only one thing uses the GPU at a time: starting a worker stops the running system.

    Nothing waits longer than `left_s`.
    """

    dry_run: bool
    budget_s: float
    """Of the whole run, from now on."""
    rng: random.Random = field(default_factory=lambda: random.Random(20_250_101))
    notes: dict[str, float] = field(default_factory=dict)
    """What one line measured for another."""
    _running: tuple[tuple[str, int], System, contextlib.ExitStack] | None = None

    def __post_init__(self) -> None:
        self._until_s = self._line_until_s = time.monotonic() + self.budget_s

    def begin(self, needed_s: float, at_most_s: float) -> bool:
        """A line that needs about so long begins, and is ended after `at_most_s`; False if the run has less time left."""
        now = time.monotonic()
        self._line_until_s = min(self._until_s, now + at_most_s)
        return self._until_s - now >= needed_s

    def left_s(self) -> float:
        """Seconds until the line that is being measured must be over."""
        return max(1.0, self._line_until_s - time.monotonic())

    def run(self, main: Coroutine[Any, Any, _T]) -> _T:
        """Run a client. Raises: TimeoutError when the line's time is over."""

        async def bounded() -> _T:
            async with asyncio.timeout(self.left_s()):
                return await main

        return client.run(bounded())

    @property
    def sizes(self) -> Sizes:
        return DRY if self.dry_run else FULL

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"

    @property
    def results(self) -> Path:
        """Where JSON goes: figures that mean nothing are kept apart."""
        return RESULTS / ("gpu-dry-run" if self.dry_run else "gpu")

    def shape(self, which: str) -> Shape:
        """`which`: "big" or "small"."""
        return SHAPES[getattr(self.sizes, which)]

    def folder(self, which: str) -> Path:
        """The model folder of that shape."""
        return make_model_folder(self.shape(which), RESULTS)

    @property
    def limits(self) -> dict[str, float]:
        """Measured once, before anything else: copy bandwidth in bytes/s, matrix rate in FLOP/s; NaN if that broke."""
        return self._gpu[1]

    @property
    def about(self) -> dict[str, Any]:
        """What the figures are taken with."""
        return self._gpu[0]

    @cached_property
    def _gpu(self) -> tuple[dict[str, Any], dict[str, float]]:
        with self.worker("bench.gpu.device:Gpu", device=self.device) as gpu:
            about = {**gpu.call("about"), "dry_run": self.dry_run}
            limits: dict[str, float] = {"copy_bandwidth": math.nan, "matrix_rate": math.nan}
            for name in limits:
                try:
                    limits[name] = gpu.call(name)
                except WorkerFailed:
                    traceback.print_exc()
            return about, limits

    @contextlib.contextmanager
    def worker(self, target: str, **arguments: Any) -> Iterator[Worker]:
        """A process that holds `target`, ended with the block: its memory on the GPU is free again."""
        self.stop_system()
        worker = Worker(target, left_s=self.left_s, **arguments)
        try:
            yield worker
        finally:
            worker.close()

    @contextlib.contextmanager
    def engine(self, which: str, sequences: int, tokens: int, quantization: str = "auto") -> Iterator[Worker]:
        """The bare engine of that shape, with room for `sequences` of `tokens` each."""
        blocks = sequences * (tokens // 16 + 1)
        rows = max(self.sizes.prefill_chunk, sequences)
        options = {
            "kv_blocks": blocks,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": rows,
            "quantization": quantization,
        }
        folder = str(self.folder(which))
        with self.worker("bench.gpu.engine:Engine", folder=folder, device=self.device, **options) as engine:
            yield engine

    def system(self, which: str, *, prefill: int) -> System:
        """A running `kvrelay up` with one decode node and `prefill` prefill nodes, all on the one GPU; one at a time."""
        if self._running is not None and self._running[0] == (which, prefill):
            return self._running[1]
        self.stop_system()
        sizes = self.sizes
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-gpu-")))
            config = folder / "kvrelay.toml"
            # Colocated, the decode node computes long prompts in chunks beside its streams, as servers of one kind do.
            config.write_text(
                f"[prefill]\nmax_num_batched_tokens = {max(sizes.prefill_chunk, 64)}\n"
                f"[decode]\nmax_num_batched_tokens = {512 if prefill else 2048}\nlocal_prefill_chunk = 2048\n"
            )
            arguments = [
                # Long streams live on the decode node; on a GPU of 80 GB halves would not hold them.
                *(("--prefill-gpu-memory-utilization", "0.32", "--decode-gpu-memory-utilization", "0.58") * prefill),
                *("--model", str(self.folder(which)), "--load-format", "dummy", "--dtype", "bfloat16"),
                *("--device", self.device, "--prefill", str(prefill), "--decode", "1", "--config", str(config)),
                *("--max-num-seqs", str(max(sizes.streams, sizes.peer_requests) + 8), "--log-level", "warning"),
                *("--start-timeout-s", str(_START_TIMEOUT_S), "--local-prefill-tokens", "0"),
            ]
            system = stack.enter_context(running_system(folder, *arguments))
            system.wait_usable(prefill=prefill, timeout_s=min(_START_TIMEOUT_S, self.left_s()))
            self._running = ((which, prefill), system, stack.pop_all())
        return system

    def stop_system(self) -> None:
        """End the running system, if there is one."""
        if self._running is not None:
            _, _, stack = self._running
            self._running = None
            try:
                stack.close()
            except (subprocess.TimeoutExpired, AssertionError):  # what was measured before is not lost for it
                traceback.print_exc()
