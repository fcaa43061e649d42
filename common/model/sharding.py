"""Which rank holds which part of a model: layers, heads, features, vocabulary. Pure; used before any rank starts.

A part is a half-open range. Ranges of KV heads are those of `common.kv.rank_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.base.errors import ConfigError
from common.kv.rank_layout import MAX_TP_SIZE
from common.kv.rank_layout import head_range as kv_head_range
from common.model.config import ModelConfig
from common.model.description import MultiHeadDescription, Split


@dataclass(frozen=True)
class HeadRange:
    """The attention heads of one tensor-parallel rank: query heads [q_lo, q_hi), KV heads [kv_lo, kv_hi)."""

    q_lo: int
    q_hi: int
    kv_lo: int
    kv_hi: int

    @property
    def num_q(self) -> int:
        return self.q_hi - self.q_lo

    @property
    def num_kv(self) -> int:
        return self.kv_hi - self.kv_lo


def lm_head_in_layers(config: ModelConfig) -> float:
    """How many layers have as many weights as the LM head: a decode step reads all of them once."""
    names, hidden = config.weight_names, config.hidden_size
    weights = sum(
        sum(each.outputs * each.inputs for each in layer.attention.linears(names, hidden))
        + layer.mlp.active_weights(names, hidden)
        for layer in config.layers
    )
    return config.num_layers * config.vocab_size * hidden / weights


def split_layers(
    num_layers: int, pp_size: int, explicit: tuple[int, ...] | None = None, lm_head: float = 0.0
) -> tuple[int, ...]:
    """Layers per pipeline stage: `explicit` if given, else so that the largest stage is as small as possible; later
    stages hold fewer. `lm_head`: the last stage also computes the LM head, which costs as much as this many layers.

    Raises: ConfigError if a stage would be empty or `explicit` fits neither `pp_size` nor `num_layers`.
    """
    if not 1 <= pp_size <= num_layers:
        raise ConfigError(f"pipeline-parallel size {pp_size} does not fit {num_layers} layers; use 1 to {num_layers}")
    if not explicit:
        before = pp_size - 1
        if not before:
            return (num_layers,)
        last = min(range(1, num_layers - before + 1), key=lambda n: max(-(-(num_layers - n) // before), n + lm_head))
        each, rest = divmod(num_layers - last, before)
        return (*(each + (stage < rest) for stage in range(before)), last)
    if len(explicit) != pp_size:
        raise ConfigError(f"pipeline split {list(explicit)} has {len(explicit)} stages, not the {pp_size} asked for")
    _check_stages(explicit, num_layers)
    return tuple(explicit)


def _check_stages(pp_layers: tuple[int, ...], num_layers: int) -> None:
    if min(pp_layers) < 1 or sum(pp_layers) != num_layers:
        raise ConfigError(
            f"pipeline split {list(pp_layers)} does not cover {num_layers} layers, at least one per stage: "
            f"it sums to {sum(pp_layers)}"
        )


def check_parallel(config: ModelConfig, tp_size: int, pp_layers: tuple[int, ...] = ()) -> None:
    """Refuse a layout that `config` cannot be split into; no stages given means one.

    Raises: ConfigError that names what does not divide and the sizes that would.
    """
    _check_stages(pp_layers or (config.num_layers,), config.num_layers)
    config.check_split(tp_size, max(1, len(pp_layers)))
    demands = [split for layer in dict.fromkeys(config.layers) for split in layer.splits()]
    if config.draft_head is not None:
        of_head = config.draft_head.layer.splits()
        demands += [Split(f"the draft head's {what}", fits) for what, fits in of_head]
    fitting = [ranks for ranks in range(1, MAX_TP_SIZE + 1) if all(fits(ranks) for _, fits in demands)]
    for what, fits in demands:
        if tp_size < 1 or not fits(tp_size):
            raise ConfigError(f"tensor-parallel size {tp_size} does not fit {what}; sizes that would work: {fitting}")


def head_range(attention: MultiHeadDescription, tp_rank: int, tp_size: int) -> HeadRange:
    """The heads of rank `tp_rank`; KV heads are replicated on neighbouring ranks where there are more ranks than heads.

    Every query head's KV head is in the range. `check_parallel` has accepted `tp_size`.
    """
    q_heads = attention.num_q_heads // tp_size
    kv_lo, kv_hi = kv_head_range(attention.num_kv_heads, tp_size, tp_rank)
    return HeadRange(tp_rank * q_heads, (tp_rank + 1) * q_heads, kv_lo, kv_hi)


def even_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """The `index`-th of `parts` ranges that cover `size`; lengths differ by one at most."""
    return index * size // parts, (index + 1) * size // parts


def vocab_range(vocab_size: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """The token ids of rank `tp_rank`. All ranks but the last ones hold `vocab_rows`; these may hold fewer, or none."""
    rows = vocab_rows(vocab_size, tp_size)
    return min(vocab_size, tp_rank * rows), min(vocab_size, (tp_rank + 1) * rows)


def vocab_rows(vocab_size: int, tp_size: int) -> int:
    """Rows of every rank's share of the vocabulary; ranks that hold fewer ids pad theirs."""
    return -(-vocab_size // tp_size)
