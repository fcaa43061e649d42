"""How two runs differ, with 95 % intervals. Pure.

Interleaved rounds are compared in pairs: what disturbs both sides of a pair cancels out. Two single runs are compared by
the moving-block bootstrap (latencies) and by batch means (rates), which allow for neighbouring requests that resemble
each other, but not for a machine that was busier during one of the runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.base.errors import ConfigError
from kvrelay.load.summary import LATENCIES, window_rates

_RATES = (("requests/s", "requests_per_s"), ("output tokens/s", "output_tokens_per_s"), ("goodput/s", "goodput_per_s"))
_STATISTICS = ("mean", "p50", "p99")
_RESAMPLES, _AT_ONCE, _WINDOWS, _SEED = 2000, 100, 10, 1
_T975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 % for 1 to 15 degrees of freedom."""


@dataclass(frozen=True)
class Row:
    """One figure of both runs. Latencies are in seconds."""

    name: str
    a: float
    b: float
    low: float | None
    """95 % interval of b / a; None: too few requests to say."""
    high: float | None
    lower_is_better: bool

    @property
    def verdict(self) -> str:
        """Which is better, as far as the interval says."""
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return "undecided"
        return "B is better" if (self.high < 1.0) == self.lower_is_better else "A is better"


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, list[Row]]:
    """Compare two runs. Returns how they were compared, and a row for each figure. Raises: ConfigError for a run without requests."""
    for side in (a, b):
        if side["kind"] != "run" or not side["summary"]["succeeded"]:
            raise ConfigError("both files must be results of `kvrelay load run` or `ab` with successful requests")
    paired = a["pair"] and a["pair"] == b["pair"] and len(a["rounds"]) == len(b["rounds"]) > 1
    method = (
        f"{len(a['rounds'])} interleaved rounds, in pairs" if paired else "single runs, by blocks of their requests"
    )
    rows: list[Row] = []
    for title, key in _RATES:
        if key != "goodput_per_s" or any(value is not None for value in a["summary"]["slo"].values()):
            interval = _paired_interval((key,), a, b) if paired else _rate_interval(key, a, b)
            rows.append(_row(title, (key,), a, b, interval, lower_is_better=False))
    for key, title in LATENCIES.items():
        if key == "itl_s" or not a["summary"][key] or not b["summary"][key]:
            continue
        of_requests = {} if paired else _sampled_intervals(key, a, b)
        for name in _STATISTICS:
            interval = _paired_interval((key, name), a, b) if paired else of_requests[name]
            rows.append(_row(f"{title}, {name}", (key, name), a, b, interval, lower_is_better=True))
    return method, rows


_Path = tuple[str, ...]
_Interval = tuple[float, float] | None


def _row(
    name: str, path: _Path, a: Mapping[str, Any], b: Mapping[str, Any], interval: _Interval, *, lower_is_better: bool
) -> Row:
    low, high = interval or (None, None)
    return Row(name, _figure(a["summary"], path), _figure(b["summary"], path), low, high, lower_is_better)


def _figure(summary: Mapping[str, Any], path: _Path) -> float:
    value: Any = summary
    for key in path:
        value = value[key] if value else 0.0
    return float(value)


def _paired_interval(path: _Path, a: Mapping[str, Any], b: Mapping[str, Any]) -> _Interval:
    pairs = [(_figure(x, path), _figure(y, path)) for x, y in zip(a["rounds"], b["rounds"], strict=True)]
    if any(x <= 0 or y <= 0 for x, y in pairs):
        return None
    logs = [math.log(y / x) for x, y in pairs]
    return _around(statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1)


def _sampled_intervals(column: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, _Interval]:
    """The interval of each statistic of a latency, by the bootstrap."""
    ratios = _resampled(b["samples"], column, _SEED + 1) / _resampled(a["samples"], column, _SEED)
    intervals: dict[str, _Interval] = {}
    for name, of_statistic in zip(_STATISTICS, ratios, strict=True):
        finite = of_statistic[np.isfinite(of_statistic)]
        low, high = np.quantile(finite, (0.025, 0.975)) if finite.size > _RESAMPLES // 2 else (None, None)
        intervals[name] = None if low is None or high is None else (float(low), float(high))
    return intervals


def _resampled(samples: Mapping[str, Sequence[Any]], column: str, seed: int) -> NDArray[np.float64]:
    """`_STATISTICS` of many resamples, made of blocks of requests that were sent one after the other: [3, resamples]."""
    order = np.argsort(np.asarray(samples["sent_s"]), kind="stable")
    good = [samples[column][i] for i in order if not samples["error"][i] and samples[column][i] is not None]
    values = np.asarray(good, dtype=np.float64)
    found = np.full((len(_STATISTICS), _RESAMPLES), np.nan)
    if values.size < 2:
        return found
    block = max(1, round(math.sqrt(values.size)))
    rng = np.random.default_rng(seed)
    for first in range(0, _RESAMPLES, _AT_ONCE):
        starts = rng.integers(0, values.size, (_AT_ONCE, math.ceil(values.size / block)))
        places = (starts[:, :, None] + np.arange(block)).reshape(_AT_ONCE, -1)[:, : values.size]
        taken = values[places % values.size]
        found[0, first : first + _AT_ONCE] = taken.mean(axis=1)
        found[1:, first : first + _AT_ONCE] = np.percentile(taken, (50, 99), axis=1)
    return found


def _rate_interval(key: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> _Interval:
    """The interval of the ratio of two rates, from the rates in equal parts of each run."""
    spreads: list[float] = []
    means: list[float] = []
    for side in (a, b):
        rates = window_rates(side, key, _WINDOWS)
        mean = statistics.mean(rates) if rates else 0.0
        if mean <= 0:
            return None
        means.append(mean)
        spreads.append(statistics.stdev(rates) / math.sqrt(len(rates)) / mean)
    return _around(math.log(means[1] / means[0]), math.hypot(*spreads), _WINDOWS - 1)


def _around(log_ratio: float, error: float, freedom: int) -> tuple[float, float]:
    t = _T975[freedom - 1] if freedom <= len(_T975) else 1.96 + 2.5 / freedom
    return math.exp(log_ratio - t * error), math.exp(log_ratio + t * error)
