"""What must not grow: memory, descriptors, shared memory and Redis keys of a cluster, sampled over time."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

_SPARE = {
    "memory, MB": 150.0,
    "memory of kvrelay up, MB": 8.0,
    "descriptors": 60.0,
    "/dev/shm entries": 6.0,
    "Redis keys": 12.0,
}
"""Growth that is no finding: what restarts and running requests move up and down."""


@dataclass(frozen=True)
class Growth:
    """One figure over the whole run."""

    name: str
    first: float
    """Median of the first third."""
    last: float
    """Median of the last third."""
    per_minute: float
    """Slope of a straight line through all samples."""

    @property
    def is_flat(self) -> bool:
        return self.last <= self.first + _SPARE[self.name]


def sample(supervisor: int, redis_url: str) -> dict[str, float]:
    """The figures now, summed over `kvrelay up` and its children."""
    parent = psutil.Process(supervisor)
    family = [parent, *parent.children(recursive=True)]
    found = {
        "memory, MB": _total(process.memory_info().rss / 1e6 for process in _alive(family)),
        "memory of kvrelay up, MB": parent.memory_info().rss / 1e6,
        "descriptors": _total(process.num_fds() for process in _alive(family)),
        "/dev/shm entries": float(len(list(Path("/dev/shm").iterdir()))),
    }
    with contextlib.suppress(redis.RedisError, OSError):
        found["Redis keys"] = float(redis.Redis.from_url(redis_url, socket_timeout=1).dbsize())  # pyright: ignore[reportArgumentType]
    return found


def growth(samples: list[tuple[float, dict[str, float]]]) -> list[Growth]:
    """Of each figure; samples with their time in seconds."""
    found: list[Growth] = []
    for name in _SPARE:
        points = [(time_s / 60, values[name]) for time_s, values in samples if name in values]
        if len(points) < 6:
            continue
        third = len(points) // 3
        values = [value for _, value in points]
        slope = statistics.linear_regression([time for time, _ in points], values).slope
        found.append(Growth(name, statistics.median(values[:third]), statistics.median(values[-third:]), slope))
    return found


def _alive(family: Iterable[psutil.Process]) -> Iterable[psutil.Process]:
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.num_fds()
            yield process


def _total(values: Iterable[float]) -> float:
    return float(sum(values))
