"""How many KV blocks fit on a card: what the operator allows, less all else that this rank takes.

`kv_blocks_on_gpu` is pure arithmetic on measured sizes; `common.node.profile_run` measures them. A fraction counts the
card's whole memory, whoever else uses it: two nodes on one card fit with fractions that sum to less than one. What
others hold is looked at only to refuse at once what could not be allocated now.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.base.errors import ConfigError
from common.engine.kv_transfer import STAGING_BYTES

CONTEXT_BYTES = 640 * 2**20
"""Outside PyTorch's view: the CUDA context and loaded kernels. An estimate, because what the driver reports as used
holds what other processes allocate at the same time."""
GRAPH_BYTES = 24 * 2**20
"""Of one recorded step, beside its tensors: the driver's own copy of every launch. An estimate."""
_FEWEST_BLOCKS = 2


@dataclass(frozen=True)
class GpuMemoryUse:
    """One rank's card after a profile run, all in bytes."""

    total: int
    free: int
    """As the driver reports it, with nothing of this process but its weights allocated."""
    weights: int
    activations: int
    """The most that a step takes beside weights and KV, attention's workspace and sampling included."""
    graphs: int
    """What recorded decode steps hold for good; 0 without them."""
    staging: int = 0
    """What relays may hold; 0 where they copy from KV to KV or through host memory."""

    @property
    def rest(self) -> int:
        """What this rank takes beside its KV cache."""
        return self.weights + self.activations + self.graphs + self.staging + CONTEXT_BYTES


@dataclass(frozen=True)
class KvMemoryRequest:
    """What the operator asked for; `blocks` wins over `memory_bytes`, and that over `utilization`."""

    utilization: float
    """Part of the card's memory for all of this rank."""
    memory_bytes: int | None = None
    blocks: int | None = None


def kv_blocks_on_gpu(use: GpuMemoryUse, wish: KvMemoryRequest, block_bytes: int, spare_blocks: int) -> int:
    """KV blocks for the pool, beside `spare_blocks` that no sequence gets.

    Raises: ConfigError in one sentence, with the sizes, if nothing is left for KV or if it is not free now.
    """
    allowed = int(use.total * wish.utilization)
    if wish.blocks is not None:
        blocks = wish.blocks
    elif wish.memory_bytes is not None:
        blocks = wish.memory_bytes // block_bytes
    else:
        blocks = (allowed - use.rest) // block_bytes - spare_blocks
        if blocks < _FEWEST_BLOCKS:
            raise ConfigError(
                f"--gpu-memory-utilization {wish.utilization:g} of {_gb(use.total)} is {_gb(allowed)}, which leaves no "
                f"room for KV beside {_parts(use)}: allow more, or shorten --max-num-batched-tokens or --max-num-seqs"
            )
    kv_bytes = (blocks + spare_blocks) * block_bytes
    coming = kv_bytes + use.activations + use.graphs + use.staging
    if coming > use.free:
        raise ConfigError(
            f"this node needs {_gb(coming)} more of the card for KV ({_gb(kv_bytes)}), activations, recorded steps and "
            f"staging, but of {_gb(use.total)} only {_gb(use.free)} are free beside its weights and what other processes hold: "
            "lower --gpu-memory-utilization here, or that of the other nodes on this card"
        )
    return blocks


def staging_bytes(kv_transport: str) -> int:
    """What a rank's relays may hold on its card: only NCCL moves KV through buffers there."""
    return STAGING_BYTES if kv_transport in ("auto", "collective") else 0


def _parts(use: GpuMemoryUse) -> str:
    return (
        f"weights {_gb(use.weights)}, activations {_gb(use.activations)}, recorded steps {_gb(use.graphs)}, "
        f"staging of relays {_gb(use.staging)} and the CUDA context {_gb(CONTEXT_BYTES)}"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
