"""A test that fails and passes when it runs again is printed as FLAKY; one that fails twice stays failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import TESTS

_CONFTEST = """
from support.flaky import FailedOnceMore

def pytest_addoption(parser):
    parser.addoption("--once", action="store_true")

def pytest_configure(config):
    if not config.getoption("--once") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedOnceMore(config))
"""
_TESTS = """
from pathlib import Path

import pytest

def test_fails_once():
    print("written by it")
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")

@pytest.mark.skipif("not __import__('os').environ.get('FAILS')", reason="not asked for")
def test_fails_always():
    raise AssertionError("each time")
"""


@pytest.mark.parametrize(("workers", "fails"), [("0", "1"), ("2", "")])
def test_exit_status_is_that_of_the_last_run_of_each_test(tmp_path: Path, workers: str, fails: str) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_it.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-n", workers, "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "FAILS": fails}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (pytest.ExitCode.TESTS_FAILED if fails else pytest.ExitCode.OK), done.stdout
    assert "1 flaky" in done.stdout.splitlines()[-1]
    assert "FLAKY test_it.py::test_fails_once" in done.stdout.splitlines()
    assert done.stdout.count("the first time") >= 1
    assert done.stdout.count("written by it") >= 3  # its source, and the output of both runs
    assert "FLAKY test_it.py::test_fails_always" not in done.stdout
