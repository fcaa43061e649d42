"""Checks that the KV caches of all nodes of `kvrelay up` fit in memory together. Pure but for reading the nodes' file.

A node allocates KV memory as requests need it and checks only its own cache. Without this check, nodes that share a
machine would run out of memory later, when the last cache fills, and one of them would be killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.base.errors import ConfigError
from common.config.option_groups import CPU_KV_GB
from common.config.service_configs import NodeConfig
from kvrelay.up.plan import ChildSpec, resolved_child


def check_memory(specs: Sequence[ChildSpec], environ: Mapping[str, str], free_bytes: float, *, gpus: bool) -> None:
    """Add up the main memory that the nodes of `specs` may use for KV. `gpus`: device "auto" means a GPU here.

    Caches whose size is given in blocks (--kv-blocks) are not counted: only the node knows the size of a block.

    Raises: ConfigError with the figures if that is more than `free_bytes`, or for a mistake in a node's configuration.
    """
    sizes: dict[str, float] = {}
    for spec in specs:
        if spec.role in ("prefill", "decode"):
            node = resolved_child(spec, environ).config
            assert isinstance(node, NodeConfig)
            if node.kv_blocks is None and (node.device == "cpu" or (node.device == "auto" and not gpus)):
                sizes[spec.name] = node.num_ranks * node.cpu_kv_gb
    free_gb = free_bytes / 2**30  # the unit of --kv-memory-gb
    if sum(sizes.values()) > free_gb:
        each = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items())
        raise ConfigError(
            f"the nodes' KV caches may take {sum(sizes.values()):.2f} GB of memory together ({each}), but {free_gb:.2f} GB are "
            f"free: lower --kv-memory-gb, which counts for each rank and is {CPU_KV_GB:g} by default, or start fewer nodes"
        )
