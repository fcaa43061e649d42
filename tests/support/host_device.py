"""A simulated device in CPU memory, for tests of relays over devices: late marks, lazy copies, memory shared by
descriptor."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from common.kv.storage import GroupStorage, KVStorage
from kvtransfer.copy.device import CopyRuns, StreamMark

CopyRuns = Callable[[CopyRuns, CopyRuns, int, int, int], None]


def copy_runs(dst: CopyRuns, src: CopyRuns, planes: int, blocks: int, run_bytes: int) -> None:
    """Replace the copy kernel: copy one run after the other."""
    for plane in range(planes):
        for block in range(blocks):
            to, at = (
                side.offset
                + plane * side.plane_bytes
                + (block if side.ids is None else int(side.ids[block])) * side.block_bytes
                for side in (dst, src)
            )
            dst.base[to : to + run_bytes] = src.base[at : at + run_bytes]


class LateMark:
    """A mark that is done at its `polls`-th poll, and not before `others`."""

    def __init__(
        self, polls: int, then: Callable[[], None] = lambda: None, others: tuple[StreamMark, ...] = ()
    ) -> None:
        self.polls = polls
        self.then = then
        self.others = others
        self.was_done = False

    def done(self) -> bool:
        if self.was_done:
            return True
        self.polls -= 1
        if self.polls > 0 or not all(mark.done() for mark in self.others):
            return False
        self.then()
        self.then, self.others = lambda: None, ()  # nothing keeps memory that was copied from
        self.was_done = True
        return True


class HostDevice:
    """Moves a storage's memory into a memfd. Copies complete only at the second poll."""

    gpu_id = "gpu-of-the-host"

    def __init__(self, storage: KVStorage, copy_runs: CopyRuns = copy_runs) -> None:
        assert storage.host_bytes is not None
        size = storage.host_bytes.nbytes
        self._fd = os.memfd_create("kvrelay-test-gpu", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._memory = np.frombuffer(mmap.mmap(self._fd, size), dtype=np.uint8)
        self._memory[:] = storage.host_bytes
        storage.data, storage.host_bytes = torch.from_numpy(self._memory), self._memory
        spec, scales = storage.layout.spec, [group.scales for group in storage.groups]
        storage.groups = tuple(
            GroupStorage(storage.data, group, memory, spec.block_size, own)
            for group, memory, own in zip(spec.groups, storage.memories, scales, strict=True)
        )
        self._buffers: list[np.ndarray] = []
        self._started: list[Callable[[], None]] = []
        self._followed: tuple[StreamMark, ...] = ()
        self._fences: list[LateMark] = []
        self._copy_runs = copy_runs
        self.copies = 0

    def __del__(self) -> None:
        os.close(self._fd)

    def mark(self) -> LateMark:
        return LateMark(2)

    def follow(self, mark: StreamMark) -> None:
        self._followed += (mark,)

    def copy(self, dst: CopyRuns, src: CopyRuns, planes: int, blocks: int, run_bytes: int) -> None:
        self.copies += 1
        self._started.append(lambda: self._copy_runs(dst, src, planes, blocks, run_bytes))

    def fence(self) -> LateMark:
        started, self._started = self._started, []
        followed, self._followed = self._followed, ()

        def run() -> None:
            for copy in started:
                copy()

        mark = LateMark(2, run, followed)
        self._fences = [*(m for m in self._fences if not m.was_done), mark]
        return mark

    def wait(self, at_most_s: float = math.inf) -> bool:
        until_s = time.monotonic() + at_most_s
        for mark in self._fences:
            while not mark.done():
                if time.monotonic() > until_s:
                    return False
        return True

    def as_bytes(self, storage: KVStorage) -> np.ndarray:
        return self._memory

    def reaches(self, buffer: Any) -> bool:
        return any(np.shares_memory(buffer, known) for known in self._buffers)

    def host_buffer(self, size_bytes: int) -> np.ndarray:
        buffer = np.empty(size_bytes, dtype=np.uint8)
        self._buffers.append(buffer)
        return buffer

    def device_buffer(self, size_bytes: int) -> np.ndarray:
        return self.host_buffer(size_bytes)

    def export(self) -> int:
        return os.dup(self._fd)

    def open(self, fd: int, size_bytes: int) -> np.ndarray:
        if os.fstat(fd).st_size != size_bytes:
            raise OSError(f"{os.fstat(fd).st_size} bytes, not {size_bytes}")
        return np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ), dtype=np.uint8)
