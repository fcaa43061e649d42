"""Processes that the server of warm starts forks."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import warm_start

WAITS = "import sys; sys.stdin.read()"


def test_one_thread_waits_while_another_starts_and_ends_processes() -> None:
    first = warm_start.script(WAITS)
    codes: list[int] = []
    waiter = threading.Thread(target=lambda: codes.append(first.wait(60)))
    waiter.start()
    second = warm_start.script("import sys; sys.exit(3)")
    assert second.wait(30) == 3
    second.end()
    assert waiter.is_alive()
    first.end()
    waiter.join()
    assert codes == [-9]


def test_a_wait_ends_in_time_while_other_processes_end() -> None:
    waits = warm_start.script(WAITS)
    others = [warm_start.script("") for _ in range(3)]
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.01)
    for process in (waits, *others):
        process.end()


def test_standard_output_is_buffered_as_of_a_process_that_was_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; print('lost'); os._exit(0)"
    for value, text in (("", ""), ("1", "lost\n")):
        monkeypatch.setenv("PYTHONUNBUFFERED", value)
        process = warm_start.script(code)
        assert process.stdout.read() == text
        process.end()


def test_a_variable_that_modules_read_when_they_are_imported_means_no_fork(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        for name, is_forked in (("KVRELAY_LOG_LEVEL", True), ("HF_HOME", False)):
            process = warm_start.start(
                [sys.executable, *warm_start.KVRELAY, "--help"], log, {**warm_start.environ(), name: "debug"}
            )
            assert process.wait(60) == 0
            assert isinstance(process, warm_start.WarmProcess) == is_forked
