"""What the benchmark commands share: a line that breaks, and a run whose time is over."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path

import pytest
from bench.command import Incomplete, Run
from bench.gpu import main as gpu_bench
from bench.gpu.main import LINES
from bench.gpu.session import GpuSession
from bench.results import Result, Target
from bench.worker import WorkerFailed
from rich.console import Console

ABOUT = {"cpu": "any", "cores": 1, "torch": "2"}


def test_a_benchmark_that_breaks_keeps_what_it_had_measured(tmp_path: Path) -> None:
    told = io.StringIO()
    run = Run(ABOUT, tmp_path, Console(file=told, width=150))

    def breaks() -> Result:
        result = Result("first")
        result.add("measured before", 1.5, "ms", limit=math.nan, target=Target(2, of_share=True))
        raise Incomplete(result) from RuntimeError("the GPU is gone")

    def breaks_at_once() -> Result:
        raise RuntimeError("nothing at all")

    def works() -> Result:
        result = Result("third")
        result.add("whole", 2.5, "ms")
        return result

    for name, bench in (("first", breaks), ("second", breaks_at_once), ("third", works)):
        run.measure(name, bench)
    run.left_out.append("fourth")
    assert run.conclude(tmp_path / "all.json") == 1
    whole = json.loads((tmp_path / "all.json").read_text(), parse_constant=pytest.fail)
    assert whole["broken"] == ["first", "second"]
    assert whole["left_out"] == ["fourth"]
    assert [result["figures"][0]["value"] for result in whole["results"]] == [1.5, 2.5]
    assert json.loads((tmp_path / "first.json").read_text())["figures"][0]["met"] is None
    for said in ("not whole: first, second", "no time left: fourth", "measured before"):
        assert said in told.getvalue()


def test_a_line_is_begun_only_if_the_run_has_the_time_and_bounded_by_its_own() -> None:
    session = GpuSession(dry_run=True, budget_s=100.0)
    assert session.begin(50, 60)
    assert 59 < session.left_s() <= 60
    assert session.begin(50, 500)
    assert 99 < session.left_s() <= 100
    assert not session.begin(101, 500)


def test_limits_that_hang_take_no_longer_than_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def about(session: GpuSession) -> dict[str, str]:
        allowed.append(session.left_s())
        raise WorkerFailed("it did not answer in time")

    monkeypatch.setattr(GpuSession, "about", property(about))
    monkeypatch.setattr("sys.argv", ["gpu-bench"])
    monkeypatch.setattr(gpu_bench, "end_by_exception", lambda: None)
    with pytest.raises(WorkerFailed):
        gpu_bench.main()
    assert 50 < allowed[0] <= LINES["limits"][1]


def test_what_must_be_measured_comes_first_and_nearly_all_of_it_fits_the_default() -> None:
    assert list(LINES)[:2] == ["limits", "decode"]
    assert all(needed_s < at_most_s for needed_s, at_most_s in LINES.values())
    assert sum(needed_s for needed_s, _ in LINES.values()) < 440


def test_a_client_that_hangs_ends_with_its_line() -> None:
    session = GpuSession(dry_run=True, budget_s=0.0)

    async def hangs() -> None:

        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        session.run(hangs())
