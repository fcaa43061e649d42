"""Memory of this machine and of its processes. Does not import torch, because the supervisor uses it."""

from __future__ import annotations

import contextlib
import ctypes
import math
import resource
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from glibc's malloc.h."""
_KEPT_BYTES = 2**20
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files that contain a container's memory limit: with control groups version 2, and version 1."""


def free_memory_bytes() -> float:
    """Free bytes of this machine, at most the memory limit of this container; infinite if both are unknown."""
    return _bytes_of("MemAvailable:")


def memory_bytes() -> float:
    """All memory of this machine, at most the memory limit of this container; infinite if both are unknown."""
    return _bytes_of("MemTotal:")


def _bytes_of(entry: str) -> float:
    left = math.inf
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _MEMINFO.read_text().splitlines()
        left = 1024 * int(next(line for line in lines if line.startswith(entry)).split()[1])
    for limit in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            left = min(left, int(limit.read_text()))
    return left


def peak_memory_bytes() -> int:
    """Peak memory of this process up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process of this machine; None if that cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def release_free_memory() -> None:
    """Return memory that this process has freed to the system, if the C library can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_little_free_memory() -> None:
    """Have the C library return large pieces of memory to the system as soon as they are freed (glibc).

    By default it keeps up to 64 MB for each thread that ever had a large one, and `release_free_memory` does not reach these.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
