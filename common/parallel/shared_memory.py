"""All-reduce and gather among ranks on one host, through memory that all of them map. Runs on the ranks' engine threads.

Each rank owns two slots, used in turn, and a counter. It fills its slot, raises its counter and waits until all
counters are as high; then every slot may be read. A rank reaches the counter value after next only when
all have finished reading what it wrote two operations ago, so a slot is never overwritten under a reader.
Plain stores in order suffice on x86, the only processor that `futex.AVAILABLE` admits.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from common.base.errors import RankLost
from common.parallel import futex

SLOT_BYTES = 2**20
_COUNTER_BYTES = 64
"""One cache line each, so that ranks do not disturb each other's."""
_HEADER_BYTES = 4096
_MAX_RANKS = _HEADER_BYTES // _COUNTER_BYTES
_ONE_PHASE_BYTES = 64 * 1024
"""For larger tensors on more than two ranks, each rank sums only its share: less to read, but a second wait."""
_SPINS = 40
"""Polls of a counter before sleeping; each yields the core, which the awaited rank may need."""
_CHECK_EVERY_S = 0.1
"""How often a waiting rank checks whether the awaited one is alive."""
_NAME_PREFIX = "kvrelay-"
_STALE_AFTER_S = 60.0
"""A file this old without a lock is stale; a younger one may be about to be locked."""
_LOCK_FORMAT = "hhqqi4x"
"""struct flock on 64-bit Linux."""


class Segment:
    """The mapped file. It has a name only while ranks attach: ranks that die later leave nothing behind, and the next
    segment's creator removes stale files.

    Every rank locks one byte of it, its own; the kernel releases the lock when the rank dies.
    """

    def __init__(self, rank: int, size: int, name: str | None = None) -> None:
        """`name`: of the segment that another rank has made for `size` ranks; None: make one.

        Raises: OSError, ValueError if there is none here.
        """
        self.name = f"{_NAME_PREFIX}{secrets.token_hex(8)}" if name is None else name
        if not self.name.startswith(_NAME_PREFIX) or "/" in self.name:
            raise ValueError(f"{name!r} names no segment")
        if name is None:
            _remove_stale()
        path = futex.SHM_DIR / self.name
        self._path, flags = (path, os.O_CREAT | os.O_EXCL) if name is None else (None, 0)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            if name is None:
                # Reserved now: a page that cannot be allocated later kills the process.
                os.posix_fallocate(self._fd, 0, _HEADER_BYTES + 2 * size * SLOT_BYTES)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock_of(rank))
            self.map = mmap.mmap(self._fd, _HEADER_BYTES + 2 * size * SLOT_BYTES)
        except (OSError, ValueError):
            self.close()
            raise

    def unlink(self) -> None:
        """Remove the name, once all ranks have attached or none will."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def is_alive(self, rank: int) -> bool:
        """Whether `rank` still holds its lock, wherever its process runs."""
        found = struct.unpack(_LOCK_FORMAT, fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _lock_of(rank)))
        return found[0] != fcntl.F_UNLCK

    def close(self) -> None:
        """Release the lock and the name; the memory is freed with the last tensor that views it."""
        self.unlink()
        os.close(self._fd)


def _lock_of(rank: int) -> bytes:
    return struct.pack(_LOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)


def _remove_stale() -> None:
    """Remove the files of segments whose ranks have all ended; their memory is not freed before."""
    whole_file = struct.pack(_LOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    for path in futex.SHM_DIR.glob(f"{_NAME_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, gone meanwhile, or in use
            if time.time() - path.lstat().st_mtime < _STALE_AFTER_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file)
                path.unlink()
            finally:
                os.close(fd)


class SharedMemoryGroup:
    """A `common.parallel.mesh.RankGroup` of ranks on this host."""

    def __init__(self, segment: Segment, index: int, ranks: list[int], timeout_s: float) -> None:
        """`index` is this rank's place in the group; `ranks` are the members, as the node numbers them."""
        assert len(ranks) <= _MAX_RANKS
        self._segment = segment
        self._index = index
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._size = len(ranks)
        self._others = [i for i in range(self._size) if i != index]
        whole = torch.frombuffer(segment.map, dtype=torch.uint8)
        slots = whole[_HEADER_BYTES:].view(2, self._size, SLOT_BYTES)
        self._slots = {
            dtype: (slots[0].view(dtype), slots[1].view(dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
        }
        """Both slots of each rank, [ranks, numbers]."""
        self._counters = memoryview(segment.map)[:_HEADER_BYTES].cast("I")
        self._stride = _COUNTER_BYTES // 4
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(segment.map))
        self._parity = 0
        self._count = 0

    def _share(self, piece: Tensor) -> Tensor:
        """[ranks, numbers of a slot]: the pieces [numel] of all ranks, each at the start of its slot. They hold until this rank has
        shared two more."""
        slots = self._slots[piece.dtype][self._parity]
        self._parity ^= 1
        slots[self._index, : piece.numel()].copy_(piece)
        self._barrier()
        return slots

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        room = SLOT_BYTES // x.itemsize
        for lo in range(0, flat.numel(), room):
            piece = flat[lo : lo + room] if flat.numel() > room else flat
            slots = self._share(piece)
            if self._size > 2 and piece.nbytes > _ONE_PHASE_BYTES:
                self._sum_shares(slots, piece)
            else:
                _sum_rows(slots[:, : piece.numel()], piece)
        return x

    def _sum_shares(self, slots: Tensor, out: Tensor) -> None:
        """Each rank sums one share over all slots, into its own slot; then all collect the shares."""
        n = out.numel()
        bounds = [i * n // self._size for i in range(self._size + 1)]
        lo, hi = bounds[self._index : self._index + 2]
        # Only the owner of a share reads that part of its slot, so it may write it.
        _sum_rows(slots[:, lo:hi], slots[self._index, lo:hi])
        self._barrier()
        for i in range(self._size):
            share = slice(bounds[i], bounds[i + 1])
            out[share].copy_(slots[i, share])

    def gather_columns(self, x: Tensor) -> Tensor | None:
        rows, columns = x.shape
        out = x.new_empty(rows, self._size, columns) if self._index == 0 else None
        width = min(columns, SLOT_BYTES // x.itemsize)
        height = max(1, SLOT_BYTES // x.itemsize // width)
        for top in range(0, rows, height):
            for left in range(0, columns, width):
                piece = x[top : top + height, left : left + width]
                shared = self._share(piece.reshape(-1))[:, : piece.numel()]
                if out is not None:
                    place = out[top : top + height, :, left : left + width]
                    place.copy_(shared.reshape(self._size, *piece.shape).transpose(0, 1))
        return None if out is None else out.view(rows, -1)

    def broadcast(self, x: Tensor) -> None:
        for piece in x.split(SLOT_BYTES):
            slot = self._slots[torch.uint8][self._parity][0, : piece.numel()]
            if self._index == 0:
                slot.copy_(piece)
            self._barrier()
            if self._index:
                piece.copy_(slot)
            self._parity ^= 1

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        me = self._index
        starts = [sum(row[:me]) for row in sizes]  # where the bytes for this rank begin among those that each sends
        ends = [start + row[me] for start, row in zip(starts, sizes, strict=True)]
        outs = sent.new_empty(sum(row[me] for row in sizes)).split([row[me] for row in sizes])
        for low in range(0, max(map(sum, sizes)), SLOT_BYTES):
            slots = self._share(sent[low : low + SLOT_BYTES])
            for source, (start, end, out) in enumerate(zip(starts, ends, outs, strict=True)):
                first, last = max(start, low), min(end, low + SLOT_BYTES)
                if first < last:
                    out[first - start : last - start].copy_(slots[source, first - low : last - low])
        return torch.cat(outs)

    def gather_all(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        out = x.new_empty(self._size, flat.numel())
        room = SLOT_BYTES // x.itemsize
        for piece, place in zip(flat.split(room), out.split(room, 1), strict=True):
            place.copy_(self._share(piece)[:, : piece.numel()])
        return out.view(self._size, *x.shape)

    def _barrier(self) -> None:
        """Announce that this rank's slot is written; return when all ranks have announced theirs."""
        self._count = (self._count + 1) & 0xFFFFFFFF
        mine = self._index * self._stride
        self._counters[mine] = self._count
        futex.wake(self._address + 4 * mine)
        for other in self._others:
            if self._behind(other):
                self._wait_for(other)

    def _behind(self, other: int) -> bool:
        """Whether `other` has announced less than this rank; counters wrap."""
        return (self._counters[other * self._stride] - self._count) & 0x80000000 != 0

    def _wait_for(self, other: int) -> None:
        for _ in range(_SPINS):
            os.sched_yield()
            if not self._behind(other):
                return
        word = other * self._stride
        deadline = time.monotonic() + self._timeout_s
        while True:
            seen = self._counters[word]
            if not self._behind(other):
                return
            futex.wait(self._address + 4 * word, seen, _CHECK_EVERY_S)
            if self._counters[word] != seen:
                continue
            # Checked in this order, because a rank may announce its last slot and end.
            gone = not self._segment.is_alive(other)
            if self._behind(other) and (gone or time.monotonic() > deadline):
                why = "has ended" if gone else f"did not answer within {self._timeout_s:g} s"
                raise RankLost(f"rank {self._ranks[other]} {why}; rank {self._ranks[self._index]} waited for it")

    def close(self) -> None:
        """Release the memory; a rank that still waits for this one gets RankLost."""
        self._slots.clear()
        self._counters.release()
        self._segment.close()


def _sum_rows(rows: Tensor, out: Tensor) -> None:
    """out = sum of `rows` [n, numel] in row order, so that every rank gets the same bits. `out` may be one of them."""
    if rows.size(0) == 2:
        torch.add(rows[0], rows[1], out=out)
        return
    total = torch.add(rows[0], rows[1]) if rows.dtype == torch.float32 else rows[0].float().add_(rows[1])
    for i in range(2, rows.size(0)):
        total.add_(rows[i])
    out.copy_(total)
