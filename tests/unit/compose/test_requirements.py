"""What the image installs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from support.paths import ROOT

REQUIREMENTS = runpy.run_path(str(ROOT / "compose" / "requirements.py"))


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
