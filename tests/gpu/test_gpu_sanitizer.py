"""compute-sanitizer over the kernels that append to the cache and read it. The relay's kernels have theirs beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def test_appending_and_attending_is_clean() -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    assert sanitizer is not None, "this needs compute-sanitizer, a part of the CUDA toolkit"
    tests = Path(__file__).with_name("test_gpu_attention.py")
    command = [
        sanitizer,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        str(tests),
    ]
    done = subprocess.run([*command, "-k", "writes_only"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
