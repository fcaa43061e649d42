"""What each rank of a node holds, by arithmetic: layers, experts, bytes of weights, KV of a token. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.base.errors import ConfigError
from common.base.free_memory import memory_bytes
from common.kv.rank_layout import KVLayout, RankShard
from common.kv.spec import DTYPE_BYTES
from common.model.config import ModelConfig
from common.model.description import MixtureDescription
from common.model.generic.config import GenericConfig
from common.model.hub import is_gguf
from common.model.sharding import even_range, vocab_rows
from common.node.plan import NodePlan

log = logging.getLogger(__name__)

_FEWEST_BITS = 4
"""Bits of a weight in the narrowest format that is not a floating-point one."""


@dataclass(frozen=True)
class RankHoldings:
    """One rank's part of a model."""

    shard: RankShard
    layers: range
    """Layers of the model, to which a draft head adds others."""
    num_weights: int
    """Weights of linear layers, experts, embedding and LM head, without those of a draft head."""
    experts: tuple[int, int, int] | None
    """First, end and number of the experts of a mixture, or of their slots if they move; None: no layer of the rank is one."""
    experts_move: bool
    num_mixtures: int
    """Layers that are mixtures."""
    kv_bytes: int
    """Bytes of KV of one token that is kept in all layers."""

    def describe(self, layout: KVLayout, weight_bits: int) -> str:
        """One line for operators. `weight_bits`: of the model's dtype."""
        shard = self.shard
        place = f"rank {layout.shards().index(shard)} holds layers {self.layers.start}-{self.layers.stop - 1}"
        if layout.cp_size > 1:
            place += f", block {shard.stripe.first} of every {layout.cp_size}"
        experts = ""
        if self.experts is not None:
            first, end, count = self.experts
            held = (
                f"{end - first} of {count} slots for experts"
                if self.experts_move
                else f"experts {first}-{end - 1} of {count}"
            )
            experts = f", {held} in {self.num_mixtures} of them"
        size_gb = self.num_weights * weight_bits / 8 / 1e9
        weights = f"{self.num_weights:,} weights ({size_gb:.3g} GB in {weight_bits} bits)"
        if self.layers.stop < shard.layer_hi:
            weights += " beside the draft head"
        token = "a token" if layout.cp_size == 1 else "each token of these blocks"
        token = token if layout.dp_size == 1 else "a token of its own sequences"
        return f"{place}{experts}, {weights}, and {self.kv_bytes:,} bytes of KV for {token}"


def node_holdings(config: ModelConfig, layout: KVLayout, redundant: int | None = None) -> list[RankHoldings]:
    """What the ranks of a node hold, in rank order. `redundant`: slots of a mixture beside one for each expert; None: its experts
    never move."""
    return [_rank_holdings(config, layout, shard, redundant) for shard in layout.shards()]


def _rank_holdings(config: ModelConfig, layout: KVLayout, shard: RankShard, redundant: int | None) -> RankHoldings:
    tp_size, hidden, names = layout.tp_size, config.hidden_size, config.weight_names
    spread = tp_size * layout.dp_size  # ranks that share out experts and LM head
    index = shard.stripe.first if layout.dp_size > 1 else shard.tp_rank
    layers = range(shard.layer_lo, min(shard.layer_hi, config.num_layers))
    total = 0
    experts: tuple[int, int, int] | None = None
    num_mixtures = 0
    for layer in config.layers[layers.start : layers.stop]:
        linears = [*layer.attention.linears(names, hidden), *layer.mlp.linears(names, hidden)]
        total += sum(each.outputs * each.inputs for each in linears) // tp_size
        if isinstance(layer.mlp, MixtureDescription):
            count = layer.mlp.router.num_experts
            slots = count + (redundant or 0)
            experts = (*even_range(slots, spread, index), slots)
            num_mixtures += 1
            total += hidden * count + (experts[1] - experts[0]) * 3 * hidden * layer.mlp.inner_size
    is_first, is_last = shard.pp_rank == 0, shard.pp_rank == layout.pp_size - 1
    is_one = is_first and config.tie_word_embeddings and spread == tp_size
    total += is_first * vocab_rows(config.vocab_size, tp_size) * hidden
    total += (is_last and not is_one) * vocab_rows(config.vocab_size, spread) * hidden
    groups = zip(layout.spec.groups, shard.parts, strict=True)
    kv_bytes = sum(group.token_bytes * part.num_layers * part.num_heads for group, part in groups)
    return RankHoldings(shard, layers, total, experts, redundant is not None, num_mixtures, kv_bytes)


def report_holdings(plan: NodePlan) -> None:
    """Say in the log what the ranks of this host hold. Models that classes of transformers compute are left out.

    Raises: ConfigError with the figures if their weights need more than all memory of this machine, even in the narrowest format
    that they may be in.
    """
    config = plan.model_config
    if isinstance(config, GenericConfig):
        return
    holdings = node_holdings(config, plan.layout, plan.experts.redundant_slots)
    own = [holdings[rank] for rank in plan.ranks_here]
    bits = 8 * DTYPE_BYTES[plan.dtype]
    for each in own:
        log.info("%s", each.describe(plan.layout, bits))
    is_narrowed = is_gguf(plan.path) or plan.quantization != "auto" or config.quantization is not None
    fewest = min(bits, _FEWEST_BITS) if is_narrowed else bits
    if plan.device == "cpu":
        check_fits(sum(each.num_weights for each in own), fewest, memory_bytes())


def check_fits(num_weights: int, bits: int, memory: float) -> None:
    """Refuse weights that `memory` bytes could not hold. Raises: ConfigError."""
    needed = num_weights * bits / 8
    if needed > memory:
        raise ConfigError(
            f"the model's {num_weights:,} weights take at least {needed / 2**30:.1f} GB in {bits} bits, and this machine has "
            f"{memory / 2**30:.1f} GB of memory: spread the node's ranks over more hosts, or try --quantization int4"
        )
