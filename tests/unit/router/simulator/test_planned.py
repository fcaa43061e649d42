"""The planner in the simulator: a load that turns, nodes that take a minute to start."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from router.planner.plan import COOL_DOWN_S
from router.simulator import cli
from router.simulator.hardware import Hardware, Shape
from router.simulator.planned import compare_shapes
from router.simulator.run import Simulation

SLOW = Hardware(0.1, 400e-6, 13e-9, 0.06, 500e-6, 450e-9, link_bytes_s=1.25e9)
"""A tenth of the default speed: an hour has few requests."""


def test_a_turning_load_is_served_better_than_by_any_fixed_split() -> None:
    shape = Shape(2, 2, hardware=SLOW)
    load = Simulation(shape=shape, requests=2000, rate=0.6, mix_period_s=6000, slo_ttft_s=20, slo_tpot_s=0.3)
    compared = compare_shapes(load, start_s=60.0)
    assert [figures["shape"] for figures in compared.fixed] == ["1 + 3", "2 + 2", "3 + 1"]
    assert compared.planned["requests"] == compared.planned["finished"] == 2000, "no request is lost by a change"
    assert compared.planned["goodput"] > 1.2 * compared.best["goodput"]
    assert compared.planned["goodput"] > 0.9 * compared.foresight["goodput"]
    assert compared.planned["good_per_node_hour"] > compared.best["good_per_node_hour"]
    assert compared.best["goodput"] <= compared.hindsight["goodput"] < 1
    counts = [decision.counts for _, decision in compared.changes]
    assert counts[0].prefill > counts[-1].prefill
    moves = [now.prefill - old[0] for old, now in zip([(2, 2), *counts], counts, strict=False)]
    times_s = [time_s for time_s, _ in compared.changes]
    turns = [times_s[i] - times_s[i - 1] for i in range(1, len(moves)) if moves[i] * moves[i - 1] < 0]
    assert turns
    assert min(turns) >= COOL_DOWN_S


def test_the_command_compares_all_splits(tmp_path: Path) -> None:
    out = tmp_path / "shapes.json"
    options = ["--planner", "--mix-period", "600", "--requests", "60", "--prefill", "1", "--decode", "2"]
    result = CliRunner().invoke(cli.app, [*options, "--json", str(out)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert [row["shape"] for row in json.loads(out.read_text())] == [
        "1 + 2",
        "2 + 1",
        "best split of each hour",
        "planned",
        "foresight",
    ]
    assert "good requests per node-hour" in result.output
    refused = CliRunner().invoke(cli.app, [*options, "--goodput", "0.9"])
    assert refused.exit_code == 78
    short = CliRunner().invoke(cli.app, ["--planner", "--requests", "1"])
    assert short.exit_code == 78, short.output
    assert "arrive over more than 10 s" in short.output
