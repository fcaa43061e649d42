"""The tensors of a checkpoint as its safetensors files store them. Used by a rank's main thread while it loads.

A rank that holds a slice of a tensor asks for that `Part`; only its bytes are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.base.errors import ConfigError
from common.model.files import read_header, weight_files


@dataclass(frozen=True)
class Part:
    """The half-open range [lo, hi) of a tensor along `dim`."""

    dim: int
    lo: int
    hi: int


class TensorFiles:
    """The safetensors files of one directory, opened lazily; a tensor's bytes are read when asked for."""

    def __init__(self, path: Path, optional_prefix: str = "") -> None:
        """`optional_prefix`: of names that are asked for, without which the files may hold them."""
        self._path = path
        self._prefix = optional_prefix
        self._file_of: dict[str, Path] = {}
        for file in weight_files(path):
            for name in read_header(file).spans:
                self._file_of[name] = file
        self._open: dict[Path, safe_open] = {}

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._file_of

    def dtype(self, name: str) -> str:
        """The tensor's dtype by its safetensors name, such as "BF16" or "F8_E4M3". Raises: ConfigError."""
        file = self.file_of(name)
        try:
            return self._opened(file).get_slice(self._stored(name)).get_dtype()
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: cannot read tensor {name}: {error}") from error

    def read(self, name: str, shape: tuple[int, ...] | None = None, part: Part | None = None) -> Tensor:
        """The tensor `name` or the part of it, perhaps a view of the mapped file.

        Raises: ConfigError naming file and tensor if it is missing, unreadable or not of `shape` (None: any).
        """
        file = self.file_of(name)
        try:
            stored = self._opened(file).get_slice(self._stored(name))
            found = tuple(stored.get_shape())
            if shape is not None and found != shape:
                raise ConfigError(f"{file}: tensor {name} has shape {list(found)}, config.json implies {list(shape)}")
            index = [slice(None)] * len(found)
            if part is not None:
                index[part.dim] = slice(part.lo, part.hi)
            return stored[tuple(index)] if index else self._opened(file).get_tensor(self._stored(name))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: cannot read tensor {name}: {error}") from error

    def view(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """The part of a tensor as a view of a mapping of its own: the mappings of `read`, whose pages count as this
        process's memory once they are read, end with this object.

        Raises: as `read`.
        """
        return TensorFiles(self._path, self._prefix).read(name, shape, part)

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor. Raises: ConfigError if none does."""
        file = self._file_of.get(self._stored(name))
        if file is None:
            raise ConfigError(f"{self._path}: no safetensors file holds the tensor {name}")
        return file

    def _stored(self, name: str) -> str:
        """The name in the files."""
        return name if name in self._file_of else name.removeprefix(self._prefix)

    def _opened(self, file: Path) -> safe_open:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]
