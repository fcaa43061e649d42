"""How much memory this machine has left for a process. Imports no torch: the supervisor asks, too."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

_MEMINFO, _CGROUP_LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


def free_memory_bytes() -> float:
    """Bytes that this machine has free, or that this container may have at all; infinite where neither is told."""
    left = math.inf
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _MEMINFO.read_text().splitlines()
        left = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with contextlib.suppress(OSError, ValueError):  # "max": it has no limit
        left = min(left, int(_CGROUP_LIMIT.read_text()))
    return left
