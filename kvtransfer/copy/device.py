"""Where KV lies in memory that a device reaches, and marks in the device's work. Pure.

A call only starts work on a device (`kvtransfer.copy.cuda`); `StreamMark`s tell when it has ended. The engine's thread marks the
compute stream, copies run on a stream of their own, and I/O threads poll marks without ever waiting for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from common.base.errors import CorruptSlice
from common.kv.memory_layout import GroupMemory, Strip, rank_bytes
from kvtransfer.mailbox import Command
from kvtransfer.wire import KVSlice

POLL_S = 100e-6
"""An I/O thread polls its marks this often while it has nothing else to do."""
CLOSING_S = 5.0
"""A closed end waits at most this long for its copies: the process is about to exit, and the device may hang."""


class StreamMark(Protocol):
    """A point in a stream of work."""

    def done(self) -> bool:
        """Whether all work before it has ended and its writes are visible to everyone. Never waits.

        Raises: RuntimeError if the device failed.
        """
        ...


@dataclass(frozen=True)
class CopyRuns:
    """One side of a copy. Run (p, i) begins at `base[offset + p * plane_bytes + ids[i] * block_bytes]`."""

    base: Any
    """[bytes], uint8: an array or tensor that the device reaches, or what `CudaDevice.open` gave."""
    offset: int
    plane_bytes: int
    block_bytes: int
    ids: np.ndarray | None = None
    """int64; None stands for 0, 1, 2, ..."""


@dataclass(frozen=True)
class RankMemory:
    """One rank's KV in memory that a device reaches."""

    base: Any
    groups: tuple[GroupMemory, ...]
    """For each group of the spec, where its part lies in `base`."""

    @property
    def size_bytes(self) -> int:
        return rank_bytes(self.groups)

    def check(self, piece: KVSlice, ids: np.ndarray) -> None:
        """Refuse a piece that is not here, in the blocks `ids` (int64). Raises: CorruptSlice."""
        group = self.groups[piece.group] if piece.group < len(self.groups) else None
        if (
            group is None
            or not group.part.contains(piece.part)
            or not len(ids) == piece.num_blocks > 0
            or not 0 <= ids.min() <= ids.max() < group.num_blocks
        ):
            raise CorruptSlice(f"{piece} is not in this memory ({group})")

    def runs(self, strip: Strip, piece: KVSlice, ids: np.ndarray) -> CopyRuns:
        """Where `piece`, which `check` accepts, lies in the blocks `ids`."""
        return CopyRuns(self.base, *self.groups[piece.group].place(strip, piece.part), ids)


@dataclass(frozen=True)
class LentBlocks:
    """KV in the memory of another process: what a message refers to instead of carrying a payload."""

    memory: RankMemory
    size_bytes: int
    first_block: int
    ids: np.ndarray
    """[block tables, blocks], int64: where blocks `first_block`, `first_block` + 1, ... of the sequence are in `memory`."""

    def __len__(self) -> int:
        return self.size_bytes

    def ids_of(self, piece: KVSlice, table: int) -> np.ndarray:
        """The ids of the piece's blocks, which are in block table `table`; fewer than it has if some were not lent."""
        return self.ids[table, max(piece.block_lo - self.first_block, 0) : max(piece.block_hi - self.first_block, 0)]


class DeferredCommands:
    """Commands that each wait for a mark. The marks belong to one stream, so they complete in order."""

    def __init__(self) -> None:
        self._commands: deque[tuple[StreamMark, Command]] = deque()

    def __bool__(self) -> bool:
        return bool(self._commands)

    def add(self, mark: StreamMark, command: Command) -> None:
        """Run `command` once `mark` is done."""
        self._commands.append((mark, command))

    def due(self) -> Iterator[Command]:
        """Yield the commands whose marks are done."""
        while self._commands and self._commands[0][0].done():
            yield self._commands.popleft()[1]

    def clear(self) -> None:
        """Forget them all."""
        self._commands.clear()
