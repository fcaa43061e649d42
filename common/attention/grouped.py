"""Attention of a model whose layers differ in it, for example in their sliding window or in the kind of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from common.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from common.kv.storage import GroupStorage, KVStorage


class GroupedAttention:
    """`AttentionBackend` that has a backend for each group of equal layers and calls that of a layer."""

    def __init__(
        self, backends: Sequence[AttentionBackend], layers: Sequence[Mapping[int, int]], tables: Sequence[int]
    ) -> None:
        """`layers`: for each backend, its layers, counted from the rank's first, and their numbers in its KV memory.
        `tables`: for each backend, the block table that names its blocks."""
        self.backends = backends
        self.by_table = list(zip(backends, tables, strict=True))
        """The backends, each with the block table that names its blocks."""
        self._layers, self._tables = layers, tables
        self.of_layer = {
            layer: (backend, index)
            for backend, members in zip(backends, layers, strict=True)
            for layer, index in members.items()
        }
        """The backend of each layer, counted from this rank's first, and the layer's number in that backend."""

    def plan(self, metadata: AttentionMetadata) -> None:
        batches = metadata, *metadata.others
        for backend, table in self.by_table:
            backend.plan(batches[table])

    def forward(self, layer: int, *rows: Tensor) -> Tensor:
        backend, index = self.of_layer[layer]
        return backend.forward(index, *rows)

    def for_graph(self, rows: int) -> GroupedAttention:
        return GroupedAttention([backend.for_graph(rows) for backend in self.backends], self._layers, self._tables)


def backend_of(backend: AttentionBackend, layer: int) -> tuple[AttentionBackend, int]:
    """The backend that attends in a layer, counted from this rank's first, and the layer's number in that backend."""
    return backend.of_layer[layer] if isinstance(backend, GroupedAttention) else (backend, layer)


def attention_of_groups(
    storage: KVStorage,
    shapes: Sequence[AttentionShape],
    make: Callable[[GroupStorage, AttentionShape], AttentionBackend],
) -> AttentionBackend:
    """A backend of `make` for all layers of one group that have the same shape; if one serves all layers, only that.

    `shapes`: of each layer of the rank; layers after these have no attention.
    """
    present: list[tuple[AttentionBackend, dict[int, int], int]] = []
    members = storage.layout.group_layers(storage.shard)
    for group, kv, numbers in zip(storage.layout.spec.groups, storage.groups, members, strict=True):
        layers = [layer for layer in numbers if layer < len(shapes)]
        kinds = {layer: (shapes[layer], len(shapes[layer].sinks)) for layer in layers}
        for shape, num_sinks in dict.fromkeys(kinds.values()):
            own = {layer: index for index, layer in enumerate(layers) if kinds[layer] == (shape, num_sinks)}
            # One for each layer of the memory; those of other layers are not read.
            sinks = tuple(shapes[layer if layer in own else next(iter(own))].sinks[0] for layer in layers if num_sinks)
            present.append((make(kv, replace(shape, sinks=sinks)), own, group.table))
    backends, layers, tables = zip(*present, strict=True)
    if len(backends) == 1 and storage.layout.spec.num_tables == 1:
        return backends[0]
    return GroupedAttention(backends, layers, tables)
