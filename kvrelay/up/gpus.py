"""Assigns a machine's GPUs to the nodes of `kvrelay up`. Needs neither torch nor the driver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.config.service_configs import NodeConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of one node, and the share of each one's memory that it takes by default."""

    visible: tuple[str, ...]
    """Names as in CUDA_VISIBLE_DEVICES."""
    utilization: float


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows; without it, all of this machine."""
    names = [entry.name for entry in Path("/dev").iterdir()] if Path("/dev").is_dir() else []
    return visible_gpus(environ.get(VISIBLE), names)


def visible_gpus(wanted: str | None, device_files: Iterable[str]) -> list[str]:
    """The GPUs in `wanted`, the value of CUDA_VISIBLE_DEVICES (None if unset). Like CUDA, it stops at the first -1."""
    gpus = [str(i) for i, _ in enumerate(name for name in device_files if re.fullmatch(r"nvidia\d+", name))]
    if wanted is None or not gpus:
        return gpus
    chosen = [name.strip() for name in wanted.split(",")]
    end = next((i for i, name in enumerate(chosen) if name in ("", "-1")), len(chosen))
    return chosen[:end]


def share_gpus(
    gpus: list[str], ranks: list[int], utilization: float = NodeConfig.gpu_memory_utilization
) -> list[NodeGpus | None]:
    """Assign GPUs to nodes with the given numbers of `ranks`. `utilization`: of each GPU's memory, for all nodes on it together.

    Every rank of a node gets a GPU of its own; nodes share a GPU only when none is free. A node with more ranks than
    there are GPUs gets all of them and reports the shortage itself. Without GPUs every entry is None.
    """
    if not gpus:
        return [None] * len(ranks)
    taken = [0] * len(gpus)
    places: list[list[int]] = []
    for count in ranks:
        # Least used first, then in order, so that the GPUs of a node are neighbours.
        places.append(sorted(range(len(gpus)), key=lambda gpu: (taken[gpu], gpu))[:count])
        for gpu in places[-1]:
            taken[gpu] += 1
    return [
        NodeGpus(tuple(gpus[gpu] for gpu in sorted(place)), round(utilization / max(taken[gpu] for gpu in place), 4))
        for place in places
    ]
