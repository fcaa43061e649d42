"""The tensors of a checkpoint as its files store them. Used by a rank's main thread while it loads.

A rank that holds a slice of a tensor asks for that `Part`; only its bytes are read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.base.errors import ConfigError
from common.model.files import is_torch_file, read_header, read_torch_header, weight_files

log = logging.getLogger(__name__)

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""

Beginnings = tuple[tuple[str, str], ...]
"""(prefix of names, another one)."""


@dataclass(frozen=True)
class Part:
    """The half-open range [lo, hi) of a tensor along `dim`."""

    dim: int
    lo: int
    hi: int


class _SafetensorsFile:
    """An open weight file. Methods raise SafetensorError or OSError for what cannot be read."""

    def __init__(self, path: Path) -> None:
        self._names = list(read_header(path).spans)
        self._path = path
        self._opened: safe_open | None = None

    def names(self) -> list[str]:
        return self._names

    def dtype(self, name: str) -> str:
        """By its safetensors name."""
        return self._open().get_slice(name).get_dtype()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open().get_slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """`index` has one slice for each dimension."""
        return self._open().get_slice(name)[index] if index else self._open().get_tensor(name)

    def _open(self) -> safe_open:
        if self._opened is None:
            self._opened = safe_open(self._path, framework="pt")
        return self._opened


class _TorchFile:
    """A `pytorch_model.bin`. Only tensors are read; no code in it runs. They are mapped and must not be written."""

    def __init__(self, path: Path) -> None:
        """Raises: ConfigError if the file is unreadable, or holds anything but named tensors."""
        read_torch_header(path)  # it says what is wrong with files that torch.load takes for older ones
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # a damaged or malicious file may raise anything
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"{path} holds no weights that can be loaded safely: {reason}") from error
        tensors = cast("dict[Any, Any]", found) if isinstance(found, dict) else {}
        if not tensors or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in tensors.items()):
            raise ConfigError(f"{path} holds something else than named tensors")
        self._tensors: dict[str, Tensor] = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def dtype(self, name: str) -> str:
        dtype = self._tensors[name].dtype
        return _DTYPE_NAMES.get(dtype, str(dtype))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self._tensors[name][index]


class TensorFiles:
    """The weight files of one directory; a tensor's bytes are read when asked for."""

    def __init__(self, path: Path, other_beginnings: Beginnings = ()) -> None:
        """`other_beginnings`: prefixes of names that are asked for, and those that the files may have instead."""
        self._path = path
        self._others = other_beginnings
        self._files: dict[Path, _SafetensorsFile | _TorchFile] = {
            file: _TorchFile(file) if is_torch_file(file) else _SafetensorsFile(file) for file in weight_files(path)
        }
        self._file_of = {name: file for file, opened in self._files.items() for name in opened.names()}

    def names(self) -> list[str]:
        """All tensors, as the files name them."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._file_of

    def dtype(self, name: str) -> str:
        """The tensor's dtype by its safetensors name, such as "BF16" or "F8_E4M3". Raises: ConfigError."""
        file = self.file_of(name)
        try:
            return self._files[file].dtype(self._stored(name))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: cannot read tensor {name}: {error}") from error

    def read(self, name: str, shape: tuple[int, ...] | None = None, part: Part | None = None) -> Tensor:
        """The tensor `name` or the part of it, perhaps a view of the mapped file.

        Raises: ConfigError naming file and tensor if it is missing, unreadable or not of `shape` (None: any).
        """
        file = self.file_of(name)
        try:
            found = self._files[file].shape(self._stored(name))
            if shape is not None and found != shape:
                raise ConfigError(f"{file}: tensor {name} has shape {list(found)}, config.json implies {list(shape)}")
            index = [slice(None)] * len(found)
            if part is not None:
                index[part.dim] = slice(part.lo, part.hi)
            return self._files[file].read(self._stored(name), tuple(index))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: cannot read tensor {name}: {error}") from error

    def view(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """The part of a tensor as a view of a mapping of its own: the mappings of `read`, whose pages count as this
        process's memory once they are read, end with this object.

        Raises: as `read`.
        """
        return TensorFiles(self._path, self._others).read(name, shape, part)

    def tied(self, embedding: str, lm_head: str) -> str | None:
        """Which of two tied tensors to read: `WeightSource.tied`. They are compared in the narrower of their dtypes."""
        if embedding not in self or lm_head not in self:
            return lm_head if lm_head in self else embedding
        files = TensorFiles(self._path, self._others)  # whose mappings end here
        one, two = files.read(embedding), files.read(lm_head)
        dtype = min(one.dtype, two.dtype, key=lambda dtype: dtype.itemsize)
        if torch.equal(one.to(dtype), two.to(dtype)):
            return embedding
        log.warning("the LM head is not tied to the embedding, as config.json says: %s holds another one", lm_head)
        return None

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor. Raises: ConfigError if none does."""
        file = self._file_of.get(self._stored(name))
        if file is None:
            raise ConfigError(f"{self._path}: no weight file holds the tensor {name}")
        return file

    def _stored(self, name: str) -> str:
        """The name in the files."""
        if name in self._file_of:
            return name
        others = (other + name.removeprefix(own) for own, other in self._others if name.startswith(own))
        return next((each for each in others if each in self._file_of), name)
