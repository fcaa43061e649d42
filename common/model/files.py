"""The weight files of a model directory, and their headers, read with the standard library alone.

Used at start-up, to load and to fingerprint weights. No torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from common.base.errors import ConfigError
from common.model.config_file import read_json_object
from common.model.hub import is_gguf

log = logging.getLogger(__name__)

_KINDS = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin"))
"""Weight files, most preferred first: the name of a single one, and what the names of several match."""
_MAX_HEADER_BYTES = 100_000_000
"""Largest header that safetensors' format allows."""
_LOCAL_HEADER_BYTES = 30
"""Fixed part of a zip member's own header; its name and extra field follow."""


@dataclass(frozen=True)
class Header:
    """One file's header. `spans` maps tensor name to its half-open byte range within the file."""

    raw: bytes
    size_bytes: int
    spans: dict[str, tuple[int, int]]


def is_torch_file(file: Path) -> bool:
    """Whether `torch.save` wrote the weights."""
    return file.suffix == ".bin"


def weight_files(path: Path) -> list[Path]:
    """The files that hold the model in directory `path`, in a fixed order: its safetensors files, or, without any, its
    `pytorch_model*.bin`; or the GGUF file `path`. As in transformers, a single file goes before an index, which may be left of
    the model that it was made from; but not one without some tensors of the index, whose files are all there.

    Raises: ConfigError if there are none, or if the index names one that is missing.
    """
    if is_gguf(path):
        return [path]
    for single, pattern in _KINDS:
        index = path / f"{single}.index.json"
        if (path / single).is_file() and not (index.exists() and _is_stray(path / single, index)):
            return [path / single]
        if index.exists():
            return _indexed(path, index)
        files = sorted(path.glob(pattern))
        if files:
            return files
    raise ConfigError(f"{path} holds neither safetensors files nor pytorch_model.bin")


def files_state(path: Path, load_format: str) -> str:
    """Digest of the names, sizes and times of the weight files; if it changes, they may hold other weights. The time
    of the last change (`st_ctime_ns`) is one that no program can set. Of dummy weights: nothing.

    Raises: ConfigError.
    """
    digest = hashlib.sha256()
    for file in () if load_format == "dummy" else weight_files(path):
        try:
            status = file.stat()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        times = status.st_mtime_ns, status.st_ctime_ns
        digest.update(f"\0{file.name}\0{status.st_size}\0{times}".encode())
    return digest.hexdigest()


def _is_stray(file: Path, index: Path) -> bool:
    """Whether a single file of weights lies beside the files of an index that make up the model. Raises: ConfigError for a file
    without a header.
    """
    if is_torch_file(file):
        return False  # the names of its tensors are in a pickle
    try:
        named: dict[str, Any] = read_json_object(index)["weight_map"]
        shards = _indexed(file.parent, index)
    except (ConfigError, LookupError):  # left of another model
        return False
    if file in shards or named.keys() <= read_header(file).spans.keys():
        return False
    log.warning("%s is ignored: it lacks tensors of %s, whose files are used", file, index.name)
    return True


def _indexed(path: Path, index: Path) -> list[Path]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    files = [path / name for name in sorted({str(name) for name in cast("dict[str, Any]", weight_map).values()})]
    for file in files:
        if file.parent != path or not file.is_file():
            raise ConfigError(f"{file} does not exist, but {index.name} names it")
    return files


def read_header(file: Path) -> Header:
    """The header of one safetensors file; the tensors' data is not read.

    Raises: ConfigError if the file is unreadable, truncated or not safetensors.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ConfigError(f"{file} is not a safetensors file: its header length is out of range")
            raw = stream.read(length)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    try:
        entries = cast("dict[str, Any]", json.loads(raw))
        entries.pop("__metadata__", None)
        spans = {name: _span(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{file} is not a safetensors file: its header is corrupt") from error
    end = max((hi for _, hi in spans.values()), default=0)
    if end > size:
        raise ConfigError(f"{file} is truncated: {size} bytes, but its header describes {end}")
    return Header(raw, size, spans)


def _span(entry: dict[str, Any], base: int) -> tuple[int, int]:
    lo, hi = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= lo <= hi:
        raise ValueError("offsets out of order")
    return base + lo, base + hi


def read_torch_header(file: Path) -> Header:
    """Members of the file, with their checksums, and where their bytes lie.

    Raises: ConfigError if the file is unreadable or not a zip archive, as torch writes since version 1.6.
    """
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
            members = archive.infolist()
            spans: dict[str, tuple[int, int]] = {}
            for member in members:
                stream.seek(member.header_offset)
                fixed = stream.read(_LOCAL_HEADER_BYTES)
                lengths = (int.from_bytes(fixed[at : at + 2], "little") for at in (26, 28))
                lo = member.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)
                spans[member.filename] = lo, lo + member.compress_size
        facts = [(member.filename, member.file_size, member.CRC) for member in members]
        return Header(json.dumps(facts).encode(), file.stat().st_size, spans)
    except zipfile.BadZipFile as error:
        raise ConfigError(
            f"{file} is not a weight file of torch 1.6 or later, or is truncated; convert it to safetensors"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
