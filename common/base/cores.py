"""How many processor cores this process may use. No torch.

A container's CPU quota counts: more threads than it allows only make each other wait until the next period.
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(root: Path = _ROOT, own: Path = _OWN) -> int:
    """The cores that this process may run on, at most as many as its CPU quota is worth, rounded down; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    quotas = [quota for folder in _folders(root, own) if (quota := _quota(folder)) is not None]
    return max(1, min(cores, *map(int, quotas))) if quotas else max(1, cores)


def _folders(root: Path, own: Path) -> list[Path]:
    """The control groups of this process, with those that they are in: all their quotas hold. In a container, whose path in
    `own` may be the host's, its own group is `root`."""
    folders = [root, root / "cpu"]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            base = root / "cpu" if controllers else root
            group = base / path.lstrip("/")
            folders += [each for each in (group, *group.parents) if each.is_relative_to(base) and each != base]
    return folders


def _quota(folder: Path) -> float | None:
    """The quota of one control group in cores: `cpu.max` of version 2, two files of version 1. None: unlimited, or unknown."""
    try:
        file = folder / "cpu.max"
        if file.exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return None
    return cores if cores > 0 else None
