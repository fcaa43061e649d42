"""The KV that a model caches, derived from the description of its layers. No torch."""

from __future__ import annotations

from dataclasses import replace

from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.model.config import ModelConfig

_MANY_TABLES = 8
"""Layers are not cut into more block tables than about this many: each costs some planning in every step."""


def kv_spec(config: ModelConfig, dtype: str) -> KVSpec:
    """The planes of each layer's attention; layers that cache the same planes and have the same sliding window are one
    group, or several where windows differ: then groups have block tables of their own.

    `dtype`: of the KV cache, a key of `common.kv.spec.DTYPE_BYTES`. Raises: ConfigError.
    """
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
