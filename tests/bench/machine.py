"""The limits of this machine, with which figures are compared. Runs in a separate worker process.

Every limit is the best of several kernels and repetitions, so that shares of it are not too high. Sizes of memory tests
are much larger than the caches.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

_MIB = 2**20


class Machine:
    """Measures limits; each call gives rates of this moment, the caller keeps the best of its run."""

    def __init__(self, small: bool = False) -> None:
        """`small`: sizes and repetitions that only show that it works."""
        self._repeats = 1 if small else 3
        self._bytes = (64 if small else 512) * _MIB
        words = self._bytes // 4
        self._fp32 = torch.ones(words)
        self._int64 = torch.ones(words // 2, dtype=torch.int64)
        columns = 1024
        self._matrix = self._fp32.view(-1, columns)
        self._row = torch.ones(1, columns)
        self._packed = _pack(self._matrix) if _can_pack(torch.float32) else None
        self._gemm_sizes = [(512, 512, 512)] if small else [(512, 896, 4864), (2048, 896, 4864), (2048, 2048, 2048)]
        self._copy_source = torch.ones(self._bytes // 2, dtype=torch.uint8).numpy()
        self._copy_target = self._copy_source.copy()
        self._gemms: dict[str, dict[str, Callable[[], Any]]] = {}

    def about(self) -> dict[str, Any]:
        """What the figures were taken with."""
        return {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "bf16_native": bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()),
        }

    @torch.inference_mode()
    def read_bandwidth(self) -> dict[str, float]:
        """Bytes/s of DRAM that each read-only kernel reads."""
        half = self._fp32.numel() // 2
        kernels: dict[str, Callable[[], Any]] = {
            "sum fp32": self._fp32.sum,
            "sum int64": self._int64.sum,
            "max fp32": self._fp32.max,
            "dot fp32": lambda: torch.dot(self._fp32[:half], self._fp32[half:]),
            "matvec fp32": lambda: self._matrix @ self._row[0],
        }
        if self._packed is not None:
            packed = self._packed
            kernels["packed matvec fp32"] = lambda: _linear(self._row, packed)
        return {name: self._bytes / self._best(run) for name, run in kernels.items()}

    @torch.inference_mode()
    def gemm(self, dtype: str) -> dict[str, float]:
        """FLOP/s of matrix products of this dtype, plain and oneDNN-prepacked."""
        if dtype not in self._gemms:
            self._gemms[dtype] = self._build_gemms(getattr(torch, dtype))
        rates = {}
        for name, run in self._gemms[dtype].items():
            m, k, n = (int(part) for part in name.split()[-1].split("x"))
            rates[name] = 2.0 * m * k * n / self._best(run)
        return rates

    def memcpy(self) -> float:
        """Bytes/s that one thread copies."""

        def copy() -> None:
            self._copy_target[:] = self._copy_source

        return self._copy_source.nbytes / self._best(copy)

    def _build_gemms(self, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
        runs: dict[str, Callable[[], Any]] = {}
        for m, k, n in self._gemm_sizes:
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            runs[f"plain {m}x{k}x{n}"] = lambda x=x, w=w: torch.nn.functional.linear(x, w)
            if _can_pack(dtype):
                packed = _pack(w)
                runs[f"packed {m}x{k}x{n}"] = lambda x=x, packed=packed: _linear(x, packed)
        return runs

    def _best(self, run: Callable[[], Any]) -> float:
        """Seconds of the fastest repetition; the first is to warm up."""
        times = []
        for _ in range(self._repeats + 1):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return min(times[1:])


def _can_pack(dtype: torch.dtype) -> bool:
    try:
        _linear(torch.zeros(1, 64, dtype=dtype), _pack(torch.zeros(64, 64, dtype=dtype)))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


@torch.inference_mode()
def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, 16)


@torch.inference_mode()
def _linear(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _cpu_name() -> str:
    if sys.platform.startswith("linux"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
