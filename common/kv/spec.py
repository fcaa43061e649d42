"""The KV that a model caches for every token: layer groups of named planes. Pure, no torch.

All sizes in bytes follow from here. How a node cuts this over its ranks is `common.kv.rank_layout`; where it lies in memory
is `common.kv.memory_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.base.errors import ConfigError
from common.base.hashing import BLOCK_SIZE

MAX_LAYERS, MAX_HEADS, MAX_WIDTH, MAX_BLOCK_SIZE = 4096, 4096, 2**32, 4096
"""Limits that reject hostile specs of other processes; every model is far below them."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}


@dataclass(frozen=True)
class KVPlane:
    """One vector that every layer of a group keeps for each token and head, such as the key."""

    name: str
    width: int
    """Numbers per token and head: the head's dimension, or the width of a latent."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same planes and have the same sliding window, cut over the ranks in the same way.

    A layer that keeps some planes per head and others without heads is in two groups.
    """

    layers: tuple[int, ...]
    """Numbers of the layers in the model, ascending."""
    planes: tuple[KVPlane, ...]
    num_heads: int
    """KV heads, split over the tensor-parallel ranks; 1 for planes without heads, which each of these ranks holds whole."""
    dtype: str
    window: int | None = None
    """Tokens that a row attends to, its own included: those at positions (p - window, p] for a row at p. None: all up to p."""
    table: int = 0
    """Which of a sequence's block tables names the blocks of these layers. Only groups of equal shape may have several."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"a sliding window must be at least 1 token, got {self.window}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"unknown KV dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if not self.layers or not self.planes or min(self.num_heads, *(plane.width for plane in self.planes)) < 1:
            raise ConfigError(f"a layer group needs layers, planes and heads, and no size below 1: {self}")
        if not 0 <= self.table < MAX_LAYERS:
            raise ConfigError(f"a block table's number is from 0 to {MAX_LAYERS - 1}: {self}")
        if self.layers[-1] >= MAX_LAYERS or self.num_heads > MAX_HEADS:
            raise ConfigError(f"a model has at most {MAX_LAYERS} layers and {MAX_HEADS} KV heads")
        if any(plane.width > MAX_WIDTH for plane in self.planes):
            raise ConfigError(f"a plane is at most {MAX_WIDTH} wide")
        if self.layers[0] < 0 or any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise ConfigError(f"layers of a group must be ascending: {list(self.layers)}")

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides how one layer's blocks lie in memory."""
        return self.planes, self.num_heads, self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer and one head, over all planes."""
        return sum(plane.width for plane in self.planes) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVSpec:
    """The KV of a model. Nodes whose specs differ cannot relay to each other.

    Invariant: every layer is in at least one group.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int = BLOCK_SIZE
    """Token slots per block."""

    def __post_init__(self) -> None:
        if not self.groups or not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"a KV spec needs layer groups, and a block size from 1 to {MAX_BLOCK_SIZE}")
        missing = set(range(self.num_layers)).difference(*(group.layers for group in self.groups))
        if missing:
            raise ConfigError(f"layers {sorted(missing)} are in no group of the KV spec")
        tables = [group.table for group in self.groups]
        if set(tables) != set(range(max(tables) + 1)):
            raise ConfigError(f"block tables must be numbered from 0 without gaps: {tables}")
        if self.num_tables > 1 and (len(tables) > self.num_tables or len({g.shape for g in self.groups}) > 1):
            raise ConfigError("several block tables need one layer group each, all of one shape, for they share memory")

    @classmethod
    def uniform(
        cls, num_layers: int, num_heads: int, head_dim: int, dtype: str, *, block_size: int = BLOCK_SIZE
    ) -> KVSpec:
        """One group: every layer keeps K and V, each with `num_heads` heads of `head_dim`."""
        planes = KVPlane("k", head_dim), KVPlane("v", head_dim)
        return cls((LayerGroup(tuple(range(num_layers)), planes, num_heads, dtype),), block_size)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return 1 + max(group.layers[-1] for group in self.groups)

    @property
    def num_tables(self) -> int:
        """Block tables of a sequence."""
        return 1 + max(group.table for group in self.groups)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each block table, the sliding window beyond which none of its layers reads; None if one reads everything."""
        windows: list[int | None] = []
        for table in range(self.num_tables):
            own = [group.window for group in self.groups if group.table == table]
            windows.append(None if None in own else max(each for each in own if each is not None))
        return tuple(windows)

    @property
    def dtype(self) -> str:
        """The dtypes of all groups, each once, for people to read."""
        return "+".join(dict.fromkeys(group.dtype for group in self.groups))

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """For each group, bytes of one block in one layer and one head, over all planes."""
        return tuple(self.block_size * group.token_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers and heads, replicas not counted."""
        return sum(group.token_bytes * len(group.layers) * group.num_heads for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers and heads, replicas not counted."""
        return self.block_size * self.bytes_per_token
