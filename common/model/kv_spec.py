"""The KV that a model caches, derived from the description of its layers. No torch."""

from __future__ import annotations

from dataclasses import replace

from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.model.config import ModelConfig
from common.model.draft_head_description import HIDDEN_PLANE, DraftHeadDescription

_MANY_TABLES = 8
"""Layers are not cut into more block tables than about this many: each costs some planning in every step."""


def kv_spec(config: ModelConfig, dtype: str, hidden_dtype: str = "float32") -> KVSpec:
    """The planes of each layer's attention; layers that cache the same planes and have the same sliding window are one
    group, or several where windows differ: then groups have block tables of their own.

    `dtype`: of the KV cache, a key of `common.kv.spec.DTYPE_BYTES`. `hidden_dtype`: of the hidden states that a draft head
    reads. Raises: ConfigError.
    """
    if config.draft_head is not None:
        return _with_head(config, config.draft_head, dtype, hidden_dtype)
    members: dict[tuple[tuple[KVPlane, ...], int, int | None], list[int]] = {}
    for number, layer in enumerate(config.layers):
        attention = layer.attention
        members.setdefault((attention.planes, attention.plane_heads, attention.window), []).append(number)
    return KVSpec(
        _with_tables(
            [
                LayerGroup(tuple(layers), planes, num_heads, dtype, window)
                for (planes, num_heads, window), layers in members.items()
            ]
        )
    )


def _with_head(config: ModelConfig, head: DraftHeadDescription, dtype: str, hidden_dtype: str) -> KVSpec:
    """The KV of a model and its draft head, in one block table: the head's planes differ in shape from all others."""
    extended = replace(config, layers=(*config.layers, head.layer), draft_head=None)
    spec = in_one_table(kv_spec(extended, dtype))
    rows = LayerGroup((spec.num_layers,), (KVPlane(HIDDEN_PLANE, config.hidden_size),), 1, hidden_dtype)
    return replace(spec, groups=(*spec.groups, rows))


def _with_tables(groups: list[LayerGroup]) -> tuple[LayerGroup, ...]:
    """`groups` of layers with different windows, cut to about equal sizes, each with a block table of its own; groups of
    different shapes cannot share memory and keep one table (docs/decisions/0010-block-tables-for-windows.md)."""
    if len({group.window for group in groups}) == 1 or len({group.shape for group in groups}) > 1:
        return tuple(groups)
    sizes = [len(group.layers) for group in groups]
    most = max(min(sizes), -(-sum(sizes) // _MANY_TABLES))
    cut: list[LayerGroup] = []
    for group in groups:
        parts = -(-len(group.layers) // most)
        # Dealt out in turn, so that each stage of a pipeline has about the same number of layers of every part.
        cut += [replace(group, layers=group.layers[i::parts], table=len(cut) + i) for i in range(parts)]
    return tuple(cut)


def in_one_table(spec: KVSpec) -> KVSpec:
    """The same layers with one block table, whose blocks are kept also behind sliding windows."""
    return replace(spec, groups=tuple(replace(group, table=0) for group in spec.groups))
