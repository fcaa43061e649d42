"""The runner of the GPU suite: what fails, dies or hangs in one group costs the others nothing, and is told."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from gpu import run_suite
from gpu.run_suite import GROUPS, Group, run_all, run_group
from support.paths import ROOT
from support.system import wait_until

_TESTS = """
import os, pathlib, subprocess, sys, time, pytest
@pytest.mark.parametrize("x", [0], ids=["a name of words"])
def test_passes(x): pass
@pytest.mark.skip(reason="needs two GPUs [sic]")
def test_skips(): pass
def test_fails(): assert False
def test_dies():
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(__file__).with_name("left").write_text(str(left.pid))
    os._exit(7)
def test_hangs(): time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    """Also where its new parent has not asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_each_group_is_told_whatever_the_others_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    file = tmp_path / "test_of_all_kinds.py"
    file.write_text(_TESTS)
    alone = ("-p", "pytest_timeout", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path))
    groups = [
        Group(name, 15, (*alone, *(f"{file}::test_{kind}" for kind in kinds.split())))
        for name, kinds in (("mixed", "passes fails skips"), ("dead", "passes dies"), ("good", "passes"))
    ]
    groups.append(Group("hanging", 3, (*alone, f"{file}::test_hangs")))
    mixed, dead, good, hanging = run_all(groups, 100)
    assert (dict(mixed.counts), mixed.end, mixed.is_good) == ({"PASSED": 1, "FAILED": 1, "SKIPPED": 1}, "", False)
    assert (dict(dead.counts), dead.end) == ({"PASSED": 1}, "its process ended with 7")
    left = int((tmp_path / "left").read_text())
    wait_until(lambda: has_ended(left), 10, "what it left behind ends")
    assert (dict(good.counts), good.is_good) == ({"PASSED": 1}, True)
    assert (hanging.end, hanging.is_good) == ("ended after 3 s, not whole", False)
    assert "test_of_all_kinds.py::test_passes[a name of words] PASSED" in capsys.readouterr().out


def test_interrupted_run_ends_the_group_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_that_runs.py"
    file.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)")

    def interrupted(line: str, **_: object) -> None:
        if "pid " in line:
            pids.append(int(line.split()[-1]))
            raise KeyboardInterrupt

    pids: list[int] = []
    monkeypatch.setattr(run_suite, "print", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        run_group(Group("running", 60, ("-s", "-p", "no:cacheprovider", "-c", "/dev/null", str(file))), 60)
    assert pids
    wait_until(lambda: has_ended(pids[0]), 10, "it ends")


def test_group_that_does_not_exist_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu-check", "--only", "relay,kernel"])
    with pytest.raises(SystemExit) as end:
        run_suite.main()
    assert end.value.code == 2
    assert "no group is called kernel;" in capsys.readouterr().err


def test_groups_without_time_are_left_out_and_named() -> None:
    told = run_all(GROUPS, 0.0)
    assert [each.name for each in told] == [group.name for group in GROUPS]
    assert all("LEFT OUT" in str(each) and not each.is_good for each in told)


def test_every_gpu_test_file_is_in_a_group() -> None:
    named = {word.partition("::")[0] for group in GROUPS for word in group.arguments}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files <= named
    assert all((ROOT / name).exists() for name in named if name.startswith("tests/"))
