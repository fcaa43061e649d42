"""The GPU that holds a rank's KV, for relays: marks are events, and one kernel copies, on a stream of its own.

Nothing else in the relay calls CUDA. The compute stream never waits for anything here.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import numpy as np
import torch

from common.kv.cuda_pages import GpuMemory, cuda_library
from common.kv.storage import KVStorage
from kvtransfer.copy.device import POLL_S, CopyRuns, StreamMark

log = logging.getLogger(__name__)

_BLOCKS_PER_SM, _BLOCKS_TO_HOST = 4, 32
"""Thread blocks of a copy: enough to saturate the GPU's memory bandwidth, or its link to the host."""


class EventMark:
    """An event on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def done(self) -> bool:
        return self.event.query()


class CudaDevice:
    """A GPU with the KV of one rank, at one end of a relay. The engine computes on the stream that is current on its thread. All
    methods but `mark` belong to the end's I/O thread. Tests have a stand-in, `tests/support/host_device.py`.
    """

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage
        self._device = storage.data.device
        self._stream = torch.cuda.Stream(self._device)
        self._library = cuda_library()
        cuda: Any = torch.cuda
        properties = cuda.get_device_properties(self._device)
        self._grid: int = _BLOCKS_PER_SM * properties.multi_processor_count
        self.gpu_id: str = f"GPU-{properties.uuid}"
        """The driver's UUID of the GPU, whatever its number in this process."""

    def mark(self) -> StreamMark:
        """A mark after everything that the calling thread has started on the compute stream so far. Takes microseconds."""
        return EventMark(torch.cuda.current_stream(self._device))

    def follow(self, mark: StreamMark) -> None:
        """Run copies that are started from now on after `mark`: the GPU waits, not the caller."""
        assert isinstance(mark, EventMark)
        self._stream.wait_event(mark.event)

    def copy(self, dst: CopyRuns, src: CopyRuns, planes: int, blocks: int, run_bytes: int) -> None:
        """Start copying `planes` x `blocks` runs of `run_bytes` each. Copies run in the order of their start.

        Raises: RuntimeError or OSError if the GPU failed.
        """
        if self._library is None:
            with torch.cuda.stream(self._stream):
                copy_by_index(dst, src, planes, blocks, run_bytes)
            return
        stays = self._on_gpu(dst.base) and self._on_gpu(src.base)
        grid = self._grid if stays else _BLOCKS_TO_HOST
        # They are freed while the kernel may still read them: the allocator reuses them on this stream only, in order.
        dst_ids, src_ids = self._ids(dst), self._ids(src)
        self._library.copy_runs(self._stream, _side(dst, dst_ids), _side(src, src_ids), planes, blocks, run_bytes, grid)

    def fence(self) -> StreamMark:
        """A mark after all copies started so far."""
        return EventMark(self._stream)

    def wait(self, at_most_s: float = math.inf) -> bool:
        """Wait until all copies have ended or the GPU has failed, for at most this time. Returns whether that happened. A copy
        waits for the compute work before it, which never ends if it waits for a rank that is gone."""
        until_s = time.monotonic() + at_most_s
        try:
            while not self._stream.query():
                if time.monotonic() > until_s:
                    log.error("KV copies have not ended within %g s: the GPU hangs", at_most_s)
                    return False
                time.sleep(POLL_S)
        except RuntimeError as error:
            log.error("the GPU failed while KV was copied: %s", error)
        return True

    def as_bytes(self, storage: KVStorage) -> torch.Tensor:
        """[bytes], uint8: the whole storage."""
        return storage.data

    def reaches(self, buffer: Any) -> bool:
        """Whether the GPU can copy from and to `buffer`: its own memory, or pinned host memory."""
        tensor = as_tensor(buffer)
        return tensor.is_cuda or tensor.is_pinned()

    def host_buffer(self, size_bytes: int) -> np.ndarray:
        """[size_bytes], uint8, in pinned host memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()

    def device_buffer(self, size_bytes: int) -> torch.Tensor:
        """[size_bytes], uint8, on the GPU."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def export(self) -> int:
        """A file descriptor of the storage's memory, for another process of this host; the caller closes it.

        Raises: OSError if it cannot be shared.
        """
        if self._storage.shared is None:
            raise OSError("this KV memory was not allocated to be shared")
        return self._storage.shared.export()

    def open(self, fd: int, size_bytes: int) -> GpuMemory:
        """The memory behind a descriptor that `export` gave in another process, for `copy` to read. It stays mapped as long as
        this object lives, even if its owner has died. The caller still owns `fd`. Raises: OSError if it cannot be mapped here."""
        if self._library is None:
            raise OSError("pages.cu is not compiled")
        return self._library.open(self._device, fd, size_bytes)

    def _on_gpu(self, base: Any) -> bool:
        return isinstance(base, GpuMemory) or as_tensor(base).is_cuda

    def _ids(self, runs: CopyRuns) -> torch.Tensor | None:
        if runs.ids is None:
            return None
        with torch.cuda.stream(self._stream):
            # A copy from pageable memory would make the caller wait for the stream.
            pinned = torch.from_numpy(runs.ids).pin_memory()  # pyright: ignore[reportUnknownMemberType]
            return pinned.to(self._device, non_blocking=True)


def _side(runs: CopyRuns, ids: torch.Tensor | None) -> tuple[int, int, int, int]:
    base = runs.base
    address = base.address if isinstance(base, GpuMemory) else as_tensor(base).data_ptr()
    return address + runs.offset, runs.plane_bytes, runs.block_bytes, 0 if ids is None else ids.data_ptr()


def copy_by_index(dst: CopyRuns, src: CopyRuns, planes: int, blocks: int, run_bytes: int) -> None:
    """Copy runs of blocks on PyTorch's current stream and with its operators alone; for tensors on any device."""

    def view(runs: CopyRuns) -> torch.Tensor:
        count = blocks if runs.ids is None else int(runs.ids.max()) + 1
        strides = (runs.plane_bytes, runs.block_bytes, 1)
        return as_tensor(runs.base).as_strided((planes, count, run_bytes), strides, runs.offset)

    def indices(ids: np.ndarray, where: torch.device) -> torch.Tensor:
        return torch.from_numpy(ids).to(where)  # pyright: ignore[reportUnknownMemberType]

    rows, target = view(src), view(dst)
    if src.ids is not None:
        rows = rows.index_select(1, indices(src.ids, rows.device))
    if dst.ids is None:
        target.copy_(rows, non_blocking=True)
    else:
        rows = rows.to(target.device, non_blocking=True)
        target.index_copy_(1, indices(dst.ids, target.device), rows)


class _Writable:
    """An array's memory, declared writable and kept alive by whatever views it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def as_tensor(buffer: Any) -> torch.Tensor:
    """A tensor over the memory of an array; a tensor is returned unchanged. Runs no operator.

    Received memory is read-only, and the caller may only read it. PyTorch has no read-only tensors and would warn.
    """
    if isinstance(buffer, torch.Tensor):
        return buffer
    array = buffer if buffer.flags.writeable else np.asarray(_Writable(buffer))
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
