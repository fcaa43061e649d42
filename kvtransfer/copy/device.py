"""What a relay needs of the device that holds a rank's KV, and where KV lies on one. Pure; the seam that tests fill.

Work on a device is only started by a call and ends later. `Mark`s tell when: the compute stream is marked by the
engine's thread, copies run on a stream of their own, and I/O threads look at marks without ever waiting for one.
`kvtransfer.copy.cuda` is the real one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from common.base.errors import CorruptSlice
from common.kv.storage import KVStorage
from kvtransfer.mailbox import Command
from kvtransfer.wire import KVSlice

POLL_S = 100e-6
"""An I/O thread looks at its marks this often while it has nothing else to do."""
CLOSING_S = 5.0
"""An end that is closed waits so long for its copies: the process is about to go, and a device may stand still."""


class Mark(Protocol):
    """A place in a stream of work."""

    def done(self) -> bool:
        """All work before it has ended, and what it wrote can be seen by everybody. Never waits.

        Raises: RuntimeError if the device failed.
        """
        ...


@dataclass(frozen=True)
class Runs:
    """One side of a copy. Run (p, i) begins at `base[offset + p * plane_bytes + ids[i] * block_bytes]`."""

    base: Any
    """[bytes], uint8: an array or tensor that the device reaches, or what `RelayDevice.open` gave."""
    offset: int
    plane_bytes: int
    block_bytes: int
    ids: np.ndarray | None = None
    """int64; None stands for 0, 1, 2, ..."""


class RelayDevice(Protocol):
    """The device of one rank at one end of a relay. All but `mark` belong to that end's I/O thread."""

    @property
    def card(self) -> str:
        """Names the card, for every process of this host alike."""
        ...

    def mark(self) -> Mark:
        """After all that the calling thread has started on the compute stream so far. Takes microseconds."""
        ...

    def follow(self, mark: Mark) -> None:
        """Copies started from now on run after `mark`."""
        ...

    def copy(self, dst: Runs, src: Runs, planes: int, blocks: int, run_bytes: int) -> None:
        """Start copying `planes` x `blocks` runs of `run_bytes` each. Copies run in the order of their start."""
        ...

    def fence(self) -> Mark:
        """After all copies started so far."""
        ...

    def wait(self, at_most_s: float = math.inf) -> bool:
        """Until all copies have ended or the device has failed, but no longer than that; whether it is so. A copy
        follows what was computed before, which never ends where it waits for a rank that is gone."""
        ...

    def as_bytes(self, storage: KVStorage) -> Any:
        """[bytes], uint8: all of the storage."""
        ...

    def reaches(self, buffer: Any) -> bool:
        """Whether `copy` can use `buffer`: device memory, or pinned host memory."""
        ...

    def host_buffer(self, size_bytes: int) -> np.ndarray:
        """[size_bytes], uint8, in host memory that `copy` reaches."""
        ...

    def device_buffer(self, size_bytes: int) -> Any:
        """[size_bytes], uint8, on the device."""
        ...

    def export(self) -> int:
        """A file descriptor of the storage's memory, for another process of this host; the caller closes it.

        Raises: OSError if this memory cannot be shared.
        """
        ...

    def open(self, fd: int, size_bytes: int) -> Any:
        """The memory behind a descriptor that `export` gave in another process, to be read by `copy`. It stays
        whole for as long as this object lives, also when its owner has died. `fd` stays the caller's.

        Raises: OSError if it cannot be mapped here.
        """
        ...


@dataclass(frozen=True)
class Pages:
    """One rank's KV in memory: [layers, 2 (K, V), num_blocks, heads, head_bytes]. Layers and heads as in the model."""

    base: Any
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int
    num_blocks: int
    head_bytes: int
    """Of one head of K (or V) in one block."""

    @property
    def block_bytes(self) -> int:
        """Of one block of one plane: K or V of a layer."""
        return (self.head_hi - self.head_lo) * self.head_bytes

    @property
    def size_bytes(self) -> int:
        """Of all pages."""
        return 2 * (self.layer_hi - self.layer_lo) * self.num_blocks * self.block_bytes

    def runs(self, piece: KVSlice, ids: np.ndarray) -> Runs:
        """Where the layers and heads of `piece` lie in the blocks `ids` (int64).

        Raises: CorruptSlice if they are not here.
        """
        inside = (
            self.layer_lo <= piece.layer_lo < piece.layer_hi <= self.layer_hi
            and self.head_lo <= piece.head_lo < piece.head_hi <= self.head_hi
            and len(ids) == piece.block_hi - piece.block_lo > 0
            and 0 <= ids.min() <= ids.max() < self.num_blocks
        )
        if not inside:
            raise CorruptSlice(f"{piece} is not in these pages of {self.num_blocks} blocks")
        plane_bytes = self.num_blocks * self.block_bytes
        first = 2 * (piece.layer_lo - self.layer_lo) * plane_bytes + (piece.head_lo - self.head_lo) * self.head_bytes
        return Runs(self.base, first, plane_bytes, self.block_bytes, ids)


def pages_of(storage: KVStorage, device: RelayDevice) -> Pages:
    """A storage's own pages."""
    shard = storage.shard
    return Pages(
        device.as_bytes(storage),
        shard.layer_lo,
        shard.layer_hi,
        shard.head_lo,
        shard.head_hi,
        storage.num_blocks,
        storage.layout.slice_bytes_per_block // 2,
    )


@dataclass(frozen=True)
class LentBlocks:
    """KV that lies in another process: what a message brings instead of a payload."""

    pages: Pages
    size_bytes: int
    first_block: int
    ids: np.ndarray
    """int64: where blocks `first_block`, `first_block` + 1, ... of the sequence are in `pages`."""

    def __len__(self) -> int:
        return self.size_bytes

    def runs(self, piece: KVSlice) -> Runs:
        """As `Pages.runs`. Raises: CorruptSlice."""
        lo, hi = piece.block_lo - self.first_block, piece.block_hi - self.first_block
        return self.pages.runs(piece, self.ids[max(lo, 0) : hi])


class DeferredCommands:
    """Commands that each wait for a mark. The marks belong to one stream, so they complete in order."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Mark, Command]] = deque()

    def __bool__(self) -> bool:
        return bool(self._commands)

    def add(self, mark: Mark, command: Command) -> None:
        """Run `command` once `mark` is done."""
        self._commands.append((mark, command))

    def due(self) -> Iterator[Command]:
        """The commands whose marks are done."""
        while self._commands and self._commands[0][0].done():
            yield self._commands.popleft()[1]

    def clear(self) -> None:
        """Forget them all."""
        self._commands.clear()
