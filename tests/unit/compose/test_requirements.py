"""What the image installs: the project's dependencies, and no CUDA libraries where nobody asked for them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from support.paths import ROOT

REQUIREMENTS = runpy.run_path(str(ROOT / "compose" / "requirements.py"))


def report(folder: Path, *names: str) -> str:
    path = folder / "report.json"
    path.write_text(json.dumps({"install": [{"metadata": {"name": name, "version": "1"}} for name in names]}))
    return str(path)


def test_cuda_libraries_end_the_build_with_the_way_out(tmp_path: Path) -> None:
    REQUIREMENTS["refuse_cuda"](report(tmp_path, "torch", "sympy"))
    with pytest.raises(SystemExit, match="PIP_EXTRA_INDEX_URL"):
        REQUIREMENTS["refuse_cuda"](report(tmp_path, "torch", "nvidia-cublas-cu12"))


def test_the_image_can_make_and_use_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, source in (
        ("pyproject.toml", "pyproject.toml"),
        ("gpu-requirements.txt", "scripts/gpu-requirements.txt"),
    ):
        (tmp_path / name).write_text((ROOT / source).read_text("utf-8"))
    monkeypatch.chdir(tmp_path)
    cpu, cuda = (REQUIREMENTS["listed"](variant) for variant in ("cpu", "cuda"))
    assert any(line.startswith("torch>=") for line in cpu)
    assert any(line.startswith("cryptography>=") for line in cpu)
    assert {"einops", "ninja"} <= set(cuda) - set(cpu)
    assert not any(line.startswith("#") for line in cuda)
