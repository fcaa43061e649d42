"""One file of packed weights: tensors and numbers under a key, written once, then mapped read-only. Any thread.

A file is a header of JSON, padded to `_ALIGNMENT`, then each tensor at a multiple of it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAGIC = "kvrelay-packed-1"
_ALIGNMENT = 4096
_MAX_HEADER_BYTES = 2**20
_SAMPLE_EVERY = 2**16
_SAMPLE_BYTES = 64


@dataclass(frozen=True)
class PackedTensors:
    """What one file holds."""

    tensors: dict[str, Tensor]
    numbers: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def size_bytes(self) -> int:
        """Approximate size of its file."""
        return _ALIGNMENT + sum(_aligned(tensor.nbytes) for tensor in self.tensors.values())


def write_packed(file: Path, key: str, packed: PackedTensors) -> None:
    """Write a file in place; the caller renames it when it is whole. Raises: OSError, also if the disk is full."""
    tensors: dict[str, dict[str, Any]] = {}
    at = 0
    for name, tensor in packed.tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        sample = _sample(_bytes_of(tensor))
        tensors[name] = {"dtype": dtype, "shape": list(tensor.shape), "at": at, "sample": sample}
        at += _aligned(tensor.nbytes)
    header = {"magic": _MAGIC, "key": key, "numbers": packed.numbers, "tensors": tensors, "data_bytes": at}
    raw = json.dumps(header).encode() + b"\n"
    base = _aligned(len(raw))
    with file.open("wb") as stream:
        # A full disk is found out now; a mapped page that cannot be written would kill the process.
        os.posix_fallocate(stream.fileno(), 0, base + at)
        stream.write(raw)
        for name, tensor in packed.tensors.items():
            stream.seek(base + tensors[name]["at"])
            stream.write(_bytes_of(tensor).numpy().data)


def map_packed(file: Path, key: str) -> PackedTensors | None:
    """The tensors of a file, as views of its pages that must not be written; None if there is no such file, or if it is
    damaged or of another key. Raises: OSError."""
    try:
        stream = file.open("rb")
    except FileNotFoundError:
        return None
    with stream:
        size = os.fstat(stream.fileno()).st_size
        raw = stream.readline(_MAX_HEADER_BYTES)
        try:
            header = json.loads(raw)
            if (header["magic"], header["key"]) != (_MAGIC, key) or header["data_bytes"] + _aligned(len(raw)) != size:
                return None
        except (ValueError, KeyError, TypeError):
            return None
        pages = mmap.mmap(stream.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
    pages.madvise(mmap.MADV_WILLNEED)
    base = _aligned(len(raw))
    tensors = {name: _view(pages, base, entry) for name, entry in header["tensors"].items()}
    if any(_sample(_bytes_of(tensor)) != header["tensors"][name]["sample"] for name, tensor in tensors.items()):
        return None
    return PackedTensors(tensors, header["numbers"])


def _view(pages: mmap.mmap, base: int, entry: dict[str, Any]) -> Tensor:
    shape = torch.Size(entry["shape"])
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(pages, dtype=dtype, count=shape.numel(), offset=base + entry["at"]).view(shape)


def _sample(data: Tensor) -> str:
    """Digest of some bytes of every part of `data` [n] uint8: after a crash of the machine, a file of the right size may
    hold zeros."""
    whole = data.numel() // _SAMPLE_EVERY * _SAMPLE_EVERY
    samples = data[:whole].view(-1, _SAMPLE_EVERY)[:, :_SAMPLE_BYTES].contiguous()
    digest = hashlib.sha256(samples.numpy().data)
    digest.update(data[whole:].numpy().data)
    return digest.hexdigest()[:32]


def _bytes_of(tensor: Tensor) -> Tensor:
    """[n] uint8, the same memory. `tensor` must be contiguous."""
    return tensor.view(-1).view(torch.uint8)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
