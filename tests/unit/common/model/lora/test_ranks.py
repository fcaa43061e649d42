"""Adapters on ranks that share a model: each holds its part, and together they draw what one rank draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.lora_files import load_adapters, write_adapter
from support.oracle import make_tiny
from support.rank_processes import Case, run_ranks
from support.recording import Recorder
from support.runner_cases import drive, make_runner, prompt


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen2", "phi3", "gpt2"])
def test_every_layout_draws_what_one_rank_draws(name: str, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model")
    adapters = [str(write_adapter(tmp_path / f"a{n}", model, rank=3 * n, seed=n)) for n in (1, 2)]
    runner = make_runner(model)
    load_adapters(runner._model, adapters)
    recorder = Recorder(runner, (1, 2, 0))
    drive(recorder, [prompt(n, 250) for n in (1, 33, 9)], 16, 8)
    recording = tmp_path / "recording"
    recorder.write(recording)
    arguments = {"model": str(model), "recording": str(recording), "same_host": True, "adapters": adapters}
    layouts = [(2, [3]), (1, [2, 1]), (2, [1, 2])]
    cases = [Case(tp, len(pp), {**arguments, "pp_layers": pp}) for tp, pp in layouts]
    expected = [token.token_id for output in recorder.outputs for token in output.sampled]
    for (tp, _), outcomes in zip(layouts, run_ranks("support.rank_jobs:replay", cases), strict=True):
        assert [outcome for outcome in outcomes if outcome.error or outcome.signal] == []
        assert outcomes[-tp].value["tokens"] == expected
        assert max(outcome.value["kv_error"] for outcome in outcomes) < 1e-4
