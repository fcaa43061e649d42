"""Plots of runs: distributions of latencies, latency over time, and each node's work. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.base.errors import ConfigError
from router.simulator.run import SimulationOutcome


def plot(outcomes: Sequence[SimulationOutcome], path: Path) -> None:
    """Draw all outcomes into one file, whose extension selects the format.

    Raises: ConfigError without matplotlib, or if the file cannot be written in that format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'kvrelay[plot]'") from error
    figure: Any = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _distribution(axes[0][0], outcomes, "time to first token, s", [out.ledger.ttft_s for out in outcomes])
    _distribution(axes[0][1], outcomes, "time per output token, s", [out.ledger.tpot_s for out in outcomes])
    _over_time(axes[1][0], outcomes)
    _work(axes[1][1], outcomes)
    axes[0][0].legend()
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error}") from error


def _distribution(
    axis: Any, outcomes: Sequence[SimulationOutcome], title: str, samples: Sequence[Sequence[float]]
) -> None:
    for outcome, values in zip(outcomes, samples, strict=True):
        shares = np.linspace(0, 1, 500)
        if len(values):
            axis.plot(np.quantile(np.asarray(values), shares), shares, label=outcome.simulation.policy)
    axis.set(xscale="log", xlabel=title, ylabel="share of requests", ylim=(0, 1))
    axis.grid(alpha=0.3)


def _over_time(axis: Any, outcomes: Sequence[SimulationOutcome]) -> None:
    for outcome in outcomes:
        arrival, ttft = np.asarray(outcome.ledger.arrival_s), np.asarray(outcome.ledger.ttft_s)
        if not len(arrival):
            continue
        edges: npt.NDArray[np.float64] = np.linspace(0, float(arrival.max()) + 1e-9, 61)
        place = np.clip(np.searchsorted(edges, arrival, side="right") - 1, 0, 59)
        counts = np.bincount(place, minlength=60)
        means = np.bincount(place, ttft, minlength=60) / np.maximum(counts, 1)
        axis.plot(edges[:-1], np.where(counts > 0, means, np.nan))
    axis.set(xlabel="arrival, s", ylabel="mean time to first token, s", yscale="log")
    axis.grid(alpha=0.3)


def _work(axis: Any, outcomes: Sequence[SimulationOutcome]) -> None:
    for outcome in outcomes:
        busy = sorted(outcome.ledger.prefill_busy_s, reverse=True)
        if sum(busy):
            axis.plot(np.linspace(0, 1, len(busy)), np.asarray(busy) / np.mean(busy), marker=".")
    axis.set(xlabel="prefill nodes, busiest first", ylabel="work over the mean", ylim=(0, None))
    axis.grid(alpha=0.3)
