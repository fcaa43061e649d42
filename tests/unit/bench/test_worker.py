"""A benchmark's measuring process."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.worker import Worker, WorkerFailed

_CARRIED = """
import time
class Carried:
    def answer(self): return 42
    def long(self, size): return "x" * size
    def hang(self): time.sleep(600)
    def die(self): raise SystemExit(3)
"""


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "carried.py").write_text(_CARRIED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("carried")
def test_worker_finds_what_pythonpath_named() -> None:
    """On a GPU these are the kernels that were compiled ahead: without them it compiles for minutes, or measures
    what it falls back to."""
    worker = Worker("carried:Carried")
    try:
        assert worker.call("answer") == 42
        assert worker.call("long", size=300_000) == "x" * 300_000
        worker.start("answer")
        worker.start("answer")
        assert [worker.result(), worker.result()] == [42, 42]
    finally:
        worker.close()


@pytest.mark.usefixtures("carried")
def test_worker_that_hangs_is_killed_when_its_time_is_over() -> None:
    left_s = iter([60.0, 0.3, 30.0])
    worker = Worker("carried:Carried", left_s=lambda: next(left_s))
    try:
        with pytest.raises(WorkerFailed, match="did not answer in time"):
            worker.call("hang")
        with pytest.raises(WorkerFailed, match="ended"):
            worker.call("answer")
    finally:
        worker.close()


@pytest.mark.usefixtures("carried")
def test_worker_that_dies_says_so() -> None:
    worker = Worker("carried:Carried")
    try:
        with pytest.raises(WorkerFailed, match="ended with code 3"):
            worker.call("die")
    finally:
        worker.close()
