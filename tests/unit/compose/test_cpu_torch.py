"""`scripts/cpu-torch`: PyTorch comes without CUDA libraries, from pip's sources or from PyTorch's own index."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

_INTERPRETER = """#!/bin/sh
# Stands for Python: prints pip's plan, makes an environment of itself and uv, and notes what it was asked for.
echo "$*" >>"$LOG"
case "$*" in
    *--dry-run*) cat "$PLAN" ;;
    "-m pip install "*) exit "$PIP_EXIT" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$UV" "$3/bin/uv" ;;
esac
"""
_UV = """#!/bin/sh
echo "uv $*" >>"$LOG"
exit "$UV_EXIT"
"""


def run(
    folder: Path, *planned: str, pip_exit: int = 0, uv_exit: int = 0
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script's end, and what was called, where pip plans to install `planned`."""
    for name, text in (("python", _INTERPRETER), ("uv", _UV)):
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o755)
    plan = {"install": [{"metadata": {"name": name, "version": "1"}} for name in planned]}
    (folder / "plan").write_text(json.dumps(plan, indent=2), "utf-8")
    log = folder / "log"
    env = {
        "PATH": "/usr/bin:/bin",
        "LOG": str(log),
        "PLAN": str(folder / "plan"),
        "UV": str(folder / "uv"),
        "PIP_EXIT": str(pip_exit),
        "UV_EXIT": str(uv_exit),
        "PIP_CONSTRAINT": "pinned.lock",
    }
    command = [str(ROOT / "scripts" / "cpu-torch"), str(folder / "python")]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    return ended, log.read_text("utf-8").splitlines()


def test_nothing_is_done_where_pip_has_a_build_without_cuda(tmp_path: Path) -> None:
    ended, calls = run(tmp_path, "torch", "sympy")
    assert ended.returncode == 0
    assert len(calls) == 1


@pytest.mark.parametrize("library", ["nvidia-cublas", "cuda-toolkit"])
def test_the_build_of_pytorchs_own_index_replaces_one_with_cuda(library: str, tmp_path: Path) -> None:
    ended, calls = run(tmp_path, "torch", library)
    assert ended.returncode == 0
    python = tmp_path / "python"
    assert calls[-1] == f"uv pip install --python {python} --torch-backend=cpu --no-deps -c pinned.lock torch"


@pytest.mark.parametrize("exits", [{"uv_exit": 2}, {"pip_exit": 1}])
def test_an_index_out_of_reach_ends_with_the_way_out(exits: dict[str, int], tmp_path: Path) -> None:
    """That of PyTorch, or with PIP_NO_INDEX the one that has uv."""
    ended, _ = run(tmp_path, "torch", "nvidia-cublas", **exits)
    assert ended.returncode == 1
    assert "PIP_EXTRA_INDEX_URL" in ended.stderr
