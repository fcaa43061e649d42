"""The best that `load.machine` measured in this run, so far. In the benchmark's own process."""

from __future__ import annotations

from typing import Any

from bench.worker import Worker


class BestLimits:
    """Remembers the best rate of every kernel. Benchmarks call `measure_*` between their own repetitions."""

    def __init__(self, machine: Worker) -> None:
        self._machine = machine
        self.read: dict[str, float] = {}
        self.gemm: dict[str, dict[str, float]] = {"bfloat16": {}, "float32": {}}
        self.memcpy = 0.0

    def about(self) -> dict[str, Any]:
        """The machine in words."""
        return self._machine.call("about")

    def measure_read(self) -> float:
        """Measure once more; returns the best bytes/s so far."""
        _keep_best(self.read, self._machine.call("read_bandwidth"))
        return max(self.read.values())

    def measure_gemm(self, dtype: str) -> float:
        """Measure once more; returns the best FLOP/s so far."""
        _keep_best(self.gemm[dtype], self._machine.call("gemm", dtype=dtype))
        return max(self.gemm[dtype].values())

    def measure_memcpy(self) -> float:
        """Measure once more; returns the best bytes/s so far."""
        self.memcpy = max(self.memcpy, self._machine.call("memcpy"))
        return self.memcpy

    def close(self) -> None:
        """End the measuring process."""
        self._machine.close()


def _keep_best(best: dict[str, float], fresh: dict[str, float]) -> None:
    for name, rate in fresh.items():
        best[name] = max(best.get(name, 0.0), rate)
