"""The places of tensors in a weight file that `torch.save` wrote: `pytorch_model.bin`. No torch."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from common.base.errors import ConfigError
from common.model.files import Header

_LOCAL_HEADER_BYTES = 30
"""Fixed part of a zip member's own header; its name and extra field follow."""


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
