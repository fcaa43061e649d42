"""Compiles and loads the project's own CUDA sources. Callable from any thread.

nvcc compiles a library when it is first needed (seconds, once per user and machine), or ahead of time into a folder to be
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
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
PAGES = _ROOT / "kv" / "pages.cu"
QUANTIZED = _ROOT / "kernels" / "quantized.cu"
_ARCHITECTURES = (
    "compute_75,code=sm_75",
    "compute_80,code=sm_80",
    "compute_90,code=sm_90",
    "compute_90,code=compute_90",
)
"""Starts with the oldest GPUs that CUDA 13 supports; each also runs on later GPUs of its generation. The last entry is
PTX for newer GPUs, whose driver compiles it."""
_COMPILE_S = 300.0
_FOLDER = "kvrelay_kernels"


def load_library(source: Path) -> Any:
    """The functions of a source, compiled if necessary.

    Raises: OSError if it cannot be compiled or loaded, RuntimeError if the user has no home directory, SubprocessError.
    """
    return ctypes.CDLL(str(compiled(source)))


def compiled(source: Path) -> Path:
    """The shared library of a source. Raises: as `load_library`."""
    name = _name(source)
    built_ahead = (Path(entry) / _FOLDER / name for entry in sys.path)
    target = next((path for path in built_ahead if path.exists()), Path.home() / ".cache" / _FOLDER / name)
    if not target.exists():
        compile_source(source, target)
    return target


def _name(source: Path) -> str:
    digest = hashlib.sha256(source.read_bytes() + "".join(_ARCHITECTURES).encode()).hexdigest()
    return f"{source.stem}-{digest[:16]}.so"


def compile_source(source: Path, target: Path) -> None:
    """Compile into the shared library `target`. Raises: OSError without nvcc, SubprocessError."""
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(str(home / "bin" / "nvcc"))
    if nvcc is None:
        raise FileNotFoundError(f"{source.name} is not compiled yet, and there is no nvcc; set CUDA_HOME")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be compiling too: the last one replaces an identical file.
    unfinished = target.with_suffix(f".{os.getpid()}")
    architectures = [word for arch in _ARCHITECTURES for word in ("-gencode", f"arch={arch}")]
    command = [nvcc, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *architectures, "-o", str(unfinished)]
    try:
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=_COMPILE_S, check=False)
        if done.returncode:
            raise OSError(f"nvcc failed: {(done.stderr or done.stdout).strip()[-2000:]}")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    """Compile all sources into the folder given on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m common.kernels.cuda_source FOLDER")
    for source in (PAGES, QUANTIZED):
        target = Path(sys.argv[1]) / _FOLDER / _name(source)
        try:
            compile_source(source, target)
        except (OSError, subprocess.SubprocessError) as error:
            sys.exit(str(error))
        print(target)


if __name__ == "__main__":
    main()
