"""`scripts/install`: an environment that cannot be used is made anew, one that can be is kept."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

_INTERPRETER = """#!/bin/sh
# Stands for Python: makes an environment of itself and pip, and notes what it was asked for.
echo "$*" >>"$LOG"
case "$*" in
    "-m venv --clear .venv")
        rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python
        echo "#!$(pwd -P)/.venv/bin/python" >.venv/bin/pip ;;
    "-m pip "*) [ -e "$(dirname "$0")/pip" ] ;;
esac
"""
MADE, INSTALLED = "-m venv --clear .venv", "-m pip install"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder" / "kvrelay"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/install", "scripts/cpu-torch", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def install(checkout: Path, *arguments: str, programs: str = "/usr/bin:/bin") -> list[str]:
    """What the interpreter was asked for. `programs`: the PATH."""
    python, log = checkout.parent / "python", checkout.parent / "log"
    python.write_text(_INTERPRETER, "utf-8")
    python.chmod(0o755)
    log.write_text("", "utf-8")
    environ = {"PATH": programs, "PYTHON": str(python), "LOG": str(log)}
    subprocess.run([checkout / "scripts/install", *arguments], env=environ, capture_output=True, timeout=30, check=True)
    return log.read_text("utf-8").splitlines()


def test_a_second_run_does_nothing(checkout: Path) -> None:
    first = install(checkout)
    assert MADE in first
    assert any(call.startswith(INSTALLED) for call in first)
    assert install(checkout) == []


def test_a_run_after_the_declarations_changed_keeps_the_environment(checkout: Path) -> None:
    install(checkout)
    with (checkout / "requirements.lock").open("a", encoding="utf-8") as file:
        file.write("newer==1\n")
    calls = install(checkout)
    assert MADE not in calls
    assert any(call.startswith(INSTALLED) for call in calls)


def test_an_environment_whose_making_was_interrupted_is_made_anew(checkout: Path) -> None:
    install(checkout)
    (checkout / ".venv/bin/pip").unlink()
    (checkout / ".venv/installed-run").unlink()
    assert MADE in install(checkout)
    assert install(checkout) == []


@pytest.mark.parametrize("original_stays", [True, False])
def test_the_environment_of_another_folder_is_not_used(original_stays: bool, checkout: Path) -> None:
    install(checkout)
    copy = checkout.with_name("copy")
    (shutil.copytree if original_stays else shutil.move)(checkout, copy)
    assert MADE in install(copy)
    assert install(copy) == []


def test_an_environment_beside_the_checkout_may_be_linked(checkout: Path) -> None:
    install(checkout)
    link = checkout.with_name("other")
    link.mkdir()
    for name in ("scripts", "pyproject.toml", "requirements.lock", ".venv"):
        (link / name).symlink_to(checkout / name)
    assert install(link) == []


@pytest.mark.parametrize(("arguments", "extras"), [([], "[gpu]"), (["dev"], "[dev,gpu]")])
def test_flashinfer_is_installed_where_an_nvidia_gpu_is(checkout: Path, arguments: list[str], extras: str) -> None:
    programs = checkout.parent / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    (programs / "nvidia-smi").chmod(0o755)
    calls = install(checkout, *arguments, programs=f"{programs}:/usr/bin:/bin")
    assert any(call.endswith(f"-e .{extras}") for call in calls), calls
    assert not any("torch" in call for call in calls), "PyTorch is the one with CUDA"
