"""requirements.lock pins whatever pyproject.toml asks for, within constraints.txt; GPU runs install it, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.paths import ROOT
from support.stub_api import stub_api


def pins(name: str) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text("utf-8").splitlines())
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if line}


def test_every_dependency_is_pinned_to_a_version_that_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    asked = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    asked += [line for extra in project["project"]["optional-dependencies"].values() for line in extra]
    locked = pins("requirements.lock")
    wrong = [
        line
        for line in map(Requirement, asked)
        if not line.specifier.contains(locked.get(canonicalize_name(line.name), "none"), prereleases=True)
    ]
    assert not wrong, "run scripts/lock"


def test_gpu_runs_install_every_dependency_but_torch_which_the_image_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    lines = (ROOT / "scripts" / "gpu-requirements.txt").read_text("utf-8").splitlines()
    installed = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    asked = {canonicalize_name(Requirement(line).name) for line in project["project"]["dependencies"]}
    assert asked - installed == {"torch"}


def test_the_pins_that_were_chosen_by_hand_are_kept() -> None:
    locked = pins("requirements.lock")
    assert {name: locked.get(name) for name in pins("constraints.txt")} == pins("constraints.txt")


def test_an_audit_that_reaches_no_database_is_no_success() -> None:
    environ = {**os.environ, "OSV_URL": "http://127.0.0.1:9/v1/query"}
    done = subprocess.run([ROOT / "scripts" / "audit"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "cannot be reached, nothing was looked up" in done.stderr


def test_an_audit_without_its_program_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/audit", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    with stub_api(lambda path, body: (200, {}, {})) as stub:
        environ = {**os.environ, "OSV_URL": stub.url, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
        done = subprocess.run([tmp_path / "scripts/audit"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "pip-audit cannot be installed, nothing was looked up" in done.stderr
