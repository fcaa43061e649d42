"""Computes how many KV blocks a rank holds: on a GPU what fits into the memory that the operator allows, minus its other needs.
The node holds what its ranks can (`common.node.ranks.leader`).

`kv_blocks_on_gpu` is pure arithmetic on measured sizes; `common.node.profile_run` measures them. The utilization is a
fraction of the GPU's whole memory, regardless of other processes: two nodes fit on one GPU if their fractions sum to less
than one. Memory of other processes matters only for the check that the allocation is possible now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import ConfigError
from common.config.option_groups import CPU_KV_GB
from common.engine.kv_transfer import STAGING_BYTES

CONTEXT_BYTES = 640 * 2**20
"""Estimated memory that PyTorch does not see: the CUDA context and loaded kernels. It cannot be measured, because the memory
that the driver reports as used includes what other processes allocate at the same time."""
GRAPH_BYTES = 24 * 2**20
"""Estimated memory per captured graph in addition to its tensors: the driver's own copy of every kernel launch."""
_MIN_BLOCKS = 2


@dataclass(frozen=True)
class GpuMemoryUse:
    """Memory of one rank's GPU after a profile run, in bytes."""

    total: int
    free: int
    """Free memory that the driver reports while this process has allocated only its weights."""
    weights: int
    activations: int
    """Peak of a step, without weights and KV, but with attention's workspace and sampling."""
    graphs: int
    """Permanent memory of captured decode graphs; 0 without graphs."""
    staging: int = 0
    """Maximum for buffers of relays; 0 if relays copy from KV to KV or through host memory."""
    adapters: int = 0
    """Maximum for the LoRA adapters that the node starts with."""
    draft: int = 0
    """Activations and captured graphs of a draft model, whose weights are among `weights`."""

    @property
    def rest(self) -> int:
        """All memory of this rank except its KV cache."""
        return self.weights + self.activations + self.graphs + self.staging + self.adapters + self.draft + CONTEXT_BYTES


@dataclass(frozen=True)
class KvMemoryRequest:
    """The operator's options; `blocks` takes precedence over `memory_bytes`; on a GPU `memory_bytes` takes
    precedence over `utilization`."""

    utilization: float
    """Fraction of the GPU's memory that this rank may use in all."""
    memory_bytes: int | None = None
    blocks: int | None = None

    def blocks_on_cpu(self, block_bytes: int) -> int:
        """Number of KV blocks of a rank on a CPU."""
        return self.blocks or (self.memory_bytes or int(CPU_KV_GB * 2**30)) // block_bytes


def kv_blocks_on_gpu(use: GpuMemoryUse, wish: KvMemoryRequest, block_bytes: int, spare_blocks: int) -> int:
    """Number of KV blocks for the pool, in addition to the `spare_blocks` that no sequence gets.

    Raises: ConfigError in one sentence, with the sizes, if no memory is left for KV or it is not free now.
    """
    allowed = int(use.total * wish.utilization)
    if wish.blocks is not None:
        blocks = wish.blocks
    elif wish.memory_bytes is not None:
        blocks = wish.memory_bytes // block_bytes
    else:
        blocks = (allowed - use.rest) // block_bytes - spare_blocks
        if blocks < _MIN_BLOCKS:
            raise ConfigError(
                f"--gpu-memory-utilization {wish.utilization:g} of {_gb(use.total)} is {_gb(allowed)}, which leaves no "
                f"room for KV beside {_parts(use)}: raise it, or lower --max-num-batched-tokens or --max-num-seqs"
            )
    kv_bytes = (blocks + spare_blocks) * block_bytes
    coming = kv_bytes + use.activations + use.graphs + use.staging + use.adapters + use.draft
    if coming > use.free:
        raise ConfigError(
            f"this node needs {_gb(coming)} more GPU memory for KV ({_gb(kv_bytes)}), activations, captured graphs, "
            f"staging, adapters and a draft model, but of {_gb(use.total)} only {_gb(use.free)} are free "
            "beside its weights and other processes: lower --gpu-memory-utilization here, or that of the other nodes on this GPU"
        )
    return blocks


def staging_bytes(kv_transport: str) -> int:
    """Maximum GPU memory of a rank's relays; only NCCL moves KV through buffers in GPU memory."""
    return STAGING_BYTES if kv_transport in ("auto", "collective") else 0


def adapter_bytes(folders: Sequence[Path], max_loras: int) -> int:
    """GPU memory bound for `max_loras` of these adapters on a rank: the sizes of their files, as if the rank stored all of
    each."""
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders]
    return sum(sorted(sizes, reverse=True)[:max_loras])


def _parts(use: GpuMemoryUse) -> str:
    return (
        f"weights {_gb(use.weights)}, activations {_gb(use.activations)}, captured graphs {_gb(use.graphs)}, "
        f"staging of relays {_gb(use.staging)}, LoRA adapters {_gb(use.adapters)}, a draft model {_gb(use.draft)} and "
        f"the CUDA context {_gb(CONTEXT_BYTES)}"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
