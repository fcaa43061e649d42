"""The GPU tools on a machine without a GPU: they start, their dry runs work, and they say what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False
    )


def dry_run(folder: Path, *options: str) -> Any:
    """What the GPU benchmark writes."""
    file = folder / "all.json"
    done = run(sys.executable, str(ROOT / "tests/bench/gpu/main.py"), "--dry-run", "--json", str(file), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(file.read_text())
    assert told["broken"] == []
    return told


def test_the_benchmark_runs_dry_and_writes_its_figures(tmp_path: Path) -> None:
    """Two lines of it; the whole dry run takes more than a minute."""
    told = dry_run(tmp_path, "--only", "limits,prefill")
    assert [result["bench"] for result in told["results"]] == ["limits", "prefill"]
    assert all(figure["value"] > 0 for result in told["results"] for figure in result["figures"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_suite_of_a_gpu_ends_with_one_sentence() -> None:
    done = run(sys.executable, "-m", "pytest", "tests/gpu", "-q")
    assert done.returncode == 1
    assert "tests/gpu needs an NVIDIA GPU that PyTorch can use" in done.stdout + done.stderr
    assert "passed" not in done.stdout


def test_the_suite_of_a_gpu_can_be_imported() -> None:
    done = run(sys.executable, "-m", "pytest", "tests/gpu", "-q", "--collect-only", GPU_SUITE_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_release_of_flashinfer_is_compared_with_the_calls(tmp_path: Path) -> None:
    """An empty one takes none of them."""
    (tmp_path / "flashinfer").mkdir()
    done = run(sys.executable, "scripts/gpu-api-check", str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "0 of 19 as we call them" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["test_gpu_exactness.py", "test_gpu_system.py"])
def test_tests_of_the_gpu_suite_that_run_on_a_cpu_pass_there(file: str) -> None:
    done = run(sys.executable, "-m", "pytest", f"tests/gpu/{file}", "-q", GPU_SUITE_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_every_line_of_the_benchmark_runs_dry(tmp_path: Path) -> None:
    dry_run(tmp_path)
