"""The jobs of a plan: shares of processes, traces that do not fit, arrival times."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from kvrelay.load.plan import LoadPlan
from kvrelay.load.workload import Workload, arrivals


def trace(folder: Path, *rows: tuple[int, int, int, list[int]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return str(path)


def plan(**options: object) -> LoadPlan:
    return LoadPlan(url="http://x", model="m", **options)  # type: ignore[arg-type]


def test_processes_share_a_run_without_overlap_or_gap() -> None:
    for options in (
        {"rate": 100.0, "duration_s": 2.0},
        {"concurrency": 4, "requests": 101},
        {"rate": 50.0, "duration_s": 4.0, "turns": 3},
    ):
        whole = list(Workload(plan(**options)).jobs())
        parts = [list(Workload(plan(**options, processes=3)).jobs(process)) for process in range(3)]
        assert sorted(itertools.chain(*parts), key=lambda job: job.number) == whole
        assert min(map(len, parts)) > len(whole) // 4


def test_requests_of_a_trace_that_do_not_fit_are_skipped_and_counted(tmp_path: Path) -> None:
    path = trace(tmp_path, (0, 100, 100, [1]), (0, 512, 512, [2]), (0, 200, 100, [3]))
    workload = Workload(plan(trace=path, scale=1, max_len=512))
    assert (workload.total, workload.left_out) == (2, 1)
    assert [len(job.prompt) for job in workload.jobs()] == [100, 200]
    assert Workload(plan(trace=path, scale=1, max_len=512, requests=1)).total == 1
    with pytest.raises(ConfigError, match="fits"):
        Workload(plan(trace=path, scale=1, max_len=10))


def test_arrivals_have_the_given_rate_and_burstiness() -> None:
    for burstiness in (0.25, 1.0, 16.0):
        times = list(itertools.islice(arrivals(plan(rate=50.0, burstiness=burstiness, seed=3)), 4000))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
        variation = statistics.stdev(gaps) / statistics.mean(gaps)
        assert variation == pytest.approx(burstiness**-0.5, rel=0.15)


def test_a_burst_arrives_at_once_and_the_mean_rate_stays() -> None:
    times = list(itertools.islice(arrivals(plan(rate=50.0, seed=3, burst_size=10)), 4000))
    assert all(len(set(times[first : first + 10])) == 1 for first in range(0, 4000, 10))
    assert len(times) / times[-1] == pytest.approx(50, rel=0.15)


def test_a_ramp_grows_linearly_and_then_stays() -> None:
    ramp = plan(rate=100.0, seed=3, ramp_from=0.0, duration_s=40.0)
    times = list(itertools.takewhile(lambda at_s: at_s < 60.0, arrivals(ramp)))
    per_ten = [sum(start <= at_s < start + 10 for at_s in times) for start in range(0, 60, 10)]
    for count, expected in zip(per_ten, (125, 375, 625, 875, 1000, 1000), strict=True):
        assert count == pytest.approx(expected, rel=0.2)
