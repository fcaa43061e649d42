"""Compiles and loads the project's own CUDA sources. Callable from any thread.

nvcc compiles a library when it is first needed (within a minute, once per user and machine), or ahead of time into a folder to be
put on PYTHONPATH, as `scripts/gpu-build` does for all kernels:

    python -m common.kernels.cuda_source FOLDER
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CudaSource:
    """A file to compile."""

    path: Path
    oldest: int
    """Compute capability of the oldest GPUs that the source is for, times ten."""

    @property
    def architectures(self) -> list[str]:
        """nvcc's names of the GPUs that it compiles for. Each also runs on later GPUs of its generation; the last entry is
        PTX, which drivers of newer GPUs compile."""
        numbers = [number for number in _ARCHITECTURES if number >= self.oldest]
        real = [f"compute_{number},code=sm_{number}" for number in numbers]
        return [*real, f"compute_{numbers[-1]},code=compute_{numbers[-1]}"]

    @property
    def library(self) -> str:
        """The file name of what is compiled from it."""
        digest = hashlib.sha256(self.path.read_bytes() + "".join(self.architectures).encode()).hexdigest()
        return f"{self.path.stem}-{digest[:16]}.so"


_ARCHITECTURES = (75, 80, 90)
"""Starts with the oldest GPUs that CUDA 13 supports."""
_ROOT = Path(__file__).parent.parent
PAGES = CudaSource(_ROOT / "kv" / "pages.cu", oldest=75)
QUANTIZED = CudaSource(_ROOT / "kernels" / "quantized.cu", oldest=80)
_COMPILE_S = 300.0
_FOLDER = "kvrelay_kernels"


def load_library(source: CudaSource) -> Any:
    """The functions of a source, compiled if necessary.

    Raises: OSError if it cannot be compiled or loaded, RuntimeError if the user has no home directory, SubprocessError.
    """
    return ctypes.CDLL(str(compiled(source)))


def compiled(source: CudaSource) -> Path:
    """The shared library of a source. Raises: as `load_library`."""
    name = source.library
    built_ahead = (Path(entry) / _FOLDER / name for entry in sys.path)
    target = next((path for path in built_ahead if path.exists()), Path.home() / ".cache" / _FOLDER / name)
    if not target.exists():
        compile_source(source, target)
    return target


def compile_source(source: CudaSource, target: Path) -> None:
    """Compile into the shared library `target`. Raises: OSError without nvcc, SubprocessError."""
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(str(home / "bin" / "nvcc"))
    if nvcc is None:
        raise FileNotFoundError(f"{source.path.name} is not compiled yet, and there is no nvcc; set CUDA_HOME")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Other processes, even ones with the same id, may be compiling too: the last one replaces an identical file.
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    unfinished = Path(name)
    architectures = [word for arch in source.architectures for word in ("-gencode", f"arch={arch}")]
    command = [nvcc, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *architectures, "-o", str(unfinished)]
    try:
        done = subprocess.run(
            [*command, str(source.path)], capture_output=True, text=True, timeout=_COMPILE_S, check=False
        )
        if done.returncode:
            raise OSError(f"nvcc failed: {(done.stderr or done.stdout).strip()[-2000:]}")
        unfinished.chmod(0o755)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    """Compile all sources into the folder given on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m common.kernels.cuda_source FOLDER")
    for source in (PAGES, QUANTIZED):
        target = Path(sys.argv[1]) / _FOLDER / source.library
        try:
            if not target.exists():
                compile_source(source, target)
        except (OSError, subprocess.SubprocessError) as error:
            sys.exit(str(error))
        print(target)


if __name__ == "__main__":
    main()
