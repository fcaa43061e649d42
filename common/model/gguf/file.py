"""The metadata of a GGUF file and where its tensors lie. No torch.

`gguf.GGUFReader` makes an array of every token of the vocabulary, which takes seconds; this reader makes strings. Source: the
format's description, docs/gguf.md of ggml-org/ggml.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from common.base.errors import ConfigError
from common.model.files import Header

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` codes of the types of metadata values."""
_NUMBERS = {code: struct.Struct(f"<{code}") for code in _SCALARS.values()}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: its bytes are [lo, hi) of the file."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch has it: [out, in]."""
    kind: GGMLQuantizationType
    lo: int
    hi: int


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata, and its tensors by name."""

    path: Path
    header: Header
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def open_gguf(path: Path) -> GgufFile:
    """Read the file's header. Raises: ConfigError if it is unreadable, truncated or not GGUF."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, struct.error, OverflowError) as error:
        raise ConfigError(f"{path} is not a GGUF file, or is truncated: {error}") from error


class _Reader:
    """Reads one value after the other. Raises: ValueError, struct.error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> GgufFile:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, not one of {_VERSIONS}")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        tensors = {name: _place(name, shape, kind, base + offset) for name, shape, kind, offset in infos}
        size = len(self._data)
        end = max((tensor.hi for tensor in tensors.values()), default=0)
        if end > size:
            raise ValueError(f"{size} bytes, but its header describes {end}")
        spans = {tensor.name: (tensor.lo, tensor.hi) for tensor in tensors.values()}
        return GgufFile(self._path, Header(self._data[: self._at], size, spans), metadata, tensors)

    def _number(self, code: str) -> Any:
        number = _NUMBERS[code]
        found = number.unpack_from(self._data, self._at)[0]
        self._at += number.size
        return found

    def _string(self) -> str:
        length = self._number("Q")
        return self._take(length).decode()

    def _strings(self, count: int) -> list[str]:
        """Read `count` strings without a call for each: vocabularies have hundreds of thousands."""
        data, at, length_of = self._data, self._at, _NUMBERS["Q"].unpack_from
        found: list[str] = []
        for _ in range(count):
            lo = at + 8
            at = lo + length_of(data, at)[0]
            found.append(data[lo:at].decode())
        self._at = at
        return found

    def _take(self, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise ValueError(f"it ends within a value at byte {self._at}")
        self._at += length
        return self._data[self._at - length : self._at]

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        of, count = self._number("I"), self._number("Q")
        if of == _STRING:
            return self._strings(count)
        code = _SCALARS.get(of)
        if code is None:
            raise ValueError(f"an array has elements of type {of}")
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._number("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dims)]))
        return name, shape, self._number("I"), self._number("Q")


def _place(name: str, shape: tuple[int, ...], kind: int, lo: int) -> GgufTensor:
    known = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[known]
    if not shape or shape[-1] % block:
        raise ValueError(f"tensor {name} has shape {list(shape)}, which blocks of {block} do not divide")
    return GgufTensor(name, shape, known, lo, lo + math.prod(shape) // block * block_bytes)
