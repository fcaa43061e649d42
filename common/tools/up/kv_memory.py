"""Whether there is memory for the KV caches of all nodes of `kvrelay up` together. Pure but for reading the nodes' file.

A node takes memory as its requests need it, and looks only at its own: several that share a machine would find out when
the last one's cache fills, by one's death.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.base.errors import ConfigError
from common.config.options import CPU_KV_GB, DecodeConfig, NodeConfig, PrefillConfig
from common.config.sources import resolve
from common.tools.up.plan import ChildSpec


def check_memory(specs: Sequence[ChildSpec], environ: Mapping[str, str], free_bytes: float, *, gpus: bool) -> None:
    """Add up what the nodes of `specs` may take of the processor's memory for KV; `gpus`: "auto" is no processor here.

    A cache whose size is given in blocks (--kv-blocks) is left out: what a block takes, only the node knows.

    Raises: ConfigError with the figures if that is more than `free_bytes`, or for a mistake in a node's configuration.
    """
    sizes: dict[str, float] = {}
    for spec in specs:
        if spec.role in ("prefill", "decode"):
            node = _as_it_reads(spec, environ)
            if node.kv_blocks is None and (node.device == "cpu" or (node.device == "auto" and not gpus)):
                sizes[spec.name] = _ranks(node) * (node.kv_memory_gb or CPU_KV_GB)
    free_gb = free_bytes / 2**30  # as the option counts
    if sum(sizes.values()) > free_gb:
        each = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items())
        raise ConfigError(
            f"the nodes' KV caches may take {sum(sizes.values()):.2f} GB of memory together ({each}), but {free_gb:.2f} GB are "
            f"free: ask for less by --kv-memory-gb, which is for each rank and by default {CPU_KV_GB:g}, or for fewer nodes"
        )


def _as_it_reads(spec: ChildSpec, environ: Mapping[str, str]) -> NodeConfig:
    """The node's configuration, from the sources that its process will have."""
    cls = PrefillConfig if spec.role == "prefill" else DecodeConfig
    words = spec.argv[spec.argv.index(cls.section) + 1 :]
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    return resolve(cls, flags=flags, environ={**environ, **spec.environ}, file=None).config


def _ranks(node: NodeConfig) -> int:
    stages = 1
    if isinstance(node, DecodeConfig):
        stages = len(node.pp_layers.split(",")) if node.pp_layers else node.pipeline_parallel_size
    return node.tensor_parallel_size * stages
