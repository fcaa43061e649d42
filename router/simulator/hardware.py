"""A simulated cluster: its nodes, and cost formulas of their prefill, decode steps and transfers. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.base.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """Coefficients of one kind of node. The defaults are those of an 8B model on a GPU of the 400 TFLOP/s class."""

    prefill_fixed_s: float = 0.01
    """Per prompt: scheduling, the first step."""
    prefill_token_s: float = 40e-6
    """The linear layers, per computed token."""
    prefill_pair_s: float = 1.3e-9
    """Attention, per pair of a computed token and a token before it."""
    step_fixed_s: float = 6e-3
    """Per decode step: reading the weights."""
    step_seq_s: float = 50e-6
    """Per sequence of the batch."""
    step_token_s: float = 45e-9
    """Per token of context of the batch: reading its KV."""
    chunk_tokens: int = 2048
    """Prompt tokens per step of a decode node with a local prefill."""
    kv_token_bytes: int = 131_072
    link_bytes_s: float = 12.5e9
    """Outgoing bandwidth of one prefill node."""
    link_latency_s: float = 2e-3
    layers: int = 32
    """A relay overlaps the prefill except for at least one layer's share."""
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or not math.isfinite(value):
                raise ConfigError(f"{name} must be a number of at least 0, not {value}")
        if self.step_fixed_s <= 0 or self.link_bytes_s <= 0:
            raise ConfigError("step_fixed_s and link_bytes_s must be above 0")
        if min(self.chunk_tokens, self.layers, self.max_num_seqs) < 1:
            raise ConfigError("chunk_tokens, layers and max_num_seqs must be at least 1")

    def prefill_s(self, tokens: int, context: int) -> float:
        """Seconds to compute `tokens` after `context` cached tokens."""
        pairs = tokens * (context + tokens / 2)
        return self.prefill_fixed_s + self.prefill_token_s * tokens + self.prefill_pair_s * pairs

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds on the link, without its latency."""
        return size_bytes / self.link_bytes_s

    @property
    def tail(self) -> float:
        """The share of a relay that cannot overlap the prefill."""
        return 1.0 / self.layers


@dataclass(frozen=True)
class Shape:
    """The simulated cluster."""

    prefill: int = 4
    decode: int = 4
    cache_blocks: int = 5000
    """KV blocks of every prefill node."""
    decode_blocks: int = 5000
    block_tokens: int = 512
    index_delay_s: float = 0.1
    """Time until a change of a block is in the index: the node's batching, the stream, the router's poll."""
    report_s: float = 0.5
    """Time between two load reports of a node."""
    hardware: Hardware = field(default_factory=Hardware)
