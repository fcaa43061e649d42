"""Every benchmark of `scripts/bench` still runs. What it measures here means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench.main import BENCHES
from support.paths import ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", BENCHES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.main", "--quick", "--shape", "tiny", "--only", name]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "all.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
