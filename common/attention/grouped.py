"""Attention of a model whose layers are in several layer groups, for example with and without a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from common.kv.storage import GroupStorage, KVStorage


class GroupedAttention:
    """`AttentionBackend` that has one backend for each layer group and calls that of a layer's group."""

    def __init__(
        self, backends: Sequence[AttentionBackend], layers: Sequence[Sequence[int]], tables: Sequence[int] | None = None
    ) -> None:
        """`layers`: for each backend, its layers, counted from the rank's first, in the order of its KV memory.
        `tables`: for each backend, the block table that names its blocks; all 0 if not given."""
        assert len(backends) == len(layers)
        self.backends = tuple(backends)
        self._tables = tuple(tables or [0] * len(backends))
        self._layers = tuple(layers)
        self._of_layer = {
            layer: (backend, index)
            for backend, members in zip(backends, layers, strict=True)
            for index, layer in enumerate(members)
        }

    def of_layer(self, layer: int) -> tuple[AttentionBackend, int]:
        """The backend of a layer, counted from this rank's first, and the layer's number in that backend."""
        return self._of_layer[layer]

    def by_table(self) -> list[tuple[AttentionBackend, int]]:
        """The backends, each with the block table that names its blocks."""
        return list(zip(self.backends, self._tables, strict=True))

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare every backend for the next step's `forward` calls."""
        for backend, table in self.by_table():
            backend.plan(metadata.of_table(table))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `AttentionBackend.forward`."""
        backend, index = self._of_layer[layer]
        return backend.forward(index, q, k, v)

    def for_graph(self, rows: int) -> GroupedAttention:
        """As `AttentionBackend.for_graph`."""
        return GroupedAttention([backend.for_graph(rows) for backend in self.backends], self._layers, self._tables)


def attention_of_groups(
    storage: KVStorage, shape: AttentionShape, make: Callable[[GroupStorage, AttentionShape], AttentionBackend]
) -> AttentionBackend:
    """A backend of `make` for each layer group that has layers on this rank; a model's only group needs no other.

    `shape`: as all groups have it, with the sinks of all layers; each group adds its own sliding window.
    """
    members = storage.layout.group_layers(storage.shard)
    groups = zip(storage.layout.spec.groups, storage.groups, members, strict=True)
    present = [
        (make(kv, _shape_of(shape, group.window, layers)), layers, group.table)
        for group, kv, layers in groups
        if layers
    ]
    backends, layers, tables = zip(*present, strict=True)
    if len(backends) == 1 and storage.layout.spec.num_tables == 1:
        return backends[0]
    return GroupedAttention(backends, layers, tables)


def _shape_of(shape: AttentionShape, window: int | None, layers: Sequence[int]) -> AttentionShape:
    """`shape` for the layers of one group."""
    return replace(shape, window=window, sinks=tuple(shape.sinks[layer] for layer in layers) if shape.sinks else ())
