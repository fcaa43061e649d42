"""The limits of a GPU, measured through PyTorch, for `gpu-bench`. A worker process."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

_WARM_UP = 3


class Gpu:
    """Limits of one device; on a processor, of sizes that only show that this runs."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._is_gpu = self._device.type == "cuda"

    def about(self) -> dict[str, Any]:
        """What the figures were taken with."""
        about: dict[str, Any] = {
            "cpu": platform.processor() or platform.machine(),
            "cores": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "GPU": "none",
        }
        if self._is_gpu:
            properties = torch.cuda.get_device_properties(self._device)
            about |= {"GPU": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
            about["cuda"] = torch.version.cuda
        for package in ("flashinfer-python", "transformers"):
            try:
                about[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                about[package] = "absent"
        return about

    def copy_bandwidth(self) -> float:
        """Bytes/s of a copy from memory to memory of the device, read and written bytes together."""
        source = torch.empty(2**30 * 4 if self._is_gpu else 2**24, dtype=torch.uint8, device=self._device).random_()
        target = torch.empty_like(source)
        return 2 * source.numel() / median_s(self._device, lambda: target.copy_(source), 20)

    def matrix_rate(self) -> float:
        """FLOP/s of a bfloat16 product of cubes, of random numbers: zeros run faster."""
        side = 8192 if self._is_gpu else 256
        a, b = (torch.randn(side, side, device=self._device).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        return 2.0 * side**3 / median_s(self._device, lambda: torch.mm(a, b, out=out), 20)


def median_s(device: torch.device, run: Callable[[], Any], times: int) -> float:
    """Seconds of one call: by the device's own clock on a GPU, each call timed for itself."""
    for _ in range(_WARM_UP):
        run()
    taken: list[float] = []
    for _ in range(times):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
    return sorted(taken)[len(taken) // 2]
