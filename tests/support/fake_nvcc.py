"""Simulates a machine without nvcc, or with one that runs a test's script."""

from __future__ import annotations

from pathlib import Path

import pytest


def make_empty_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory in `folder`, and no compiler anywhere."""
    for name, value in (("HOME", "home"), ("PATH", "bin"), ("CUDA_HOME", "cuda")):
        (folder / value).mkdir()
        monkeypatch.setenv(name, str(folder / value))
    return folder / "home"


def put_nvcc(home: Path, script: str) -> None:
    """Put an nvcc that runs `script` on the PATH that `make_empty_home` has set."""
    nvcc = home.parent / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
