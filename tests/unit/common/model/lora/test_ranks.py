"""Adapters on ranks that share a model: each holds its part, and together they draw what one rank draws."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from support.lora_files import load_adapters, write_adapter
from support.oracle import make_tiny
from support.rank_jobs import Recording
from support.rank_processes import Case, run_ranks
from support.runner_cases import drive, make_runner, prompt

from common.engine.step import StepInput, StepOutput


class _Recorder:
    """Gives the sequences of each step two adapters and none, by turns, and keeps the steps."""

    def __init__(self, model: Path, adapters: list[str]) -> None:
        self.runner = make_runner(model)
        load_adapters(self.runner._model, adapters)  # pyright: ignore[reportPrivateUsage]
        self.steps: list[StepInput] = []
        self.outputs: list[StepOutput] = []

    def execute(self, step: StepInput) -> StepOutput:
        named = replace(step, adapters=[(1, 2, 0)[i % 3] for i in range(len(step.query_lens))])
        self.steps.append(named)
        self.outputs.append(self.runner.execute(named))
        return self.outputs[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen2", "phi3", "gpt2"])
def test_every_layout_draws_what_one_rank_draws(name: str, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model")
    adapters = [str(write_adapter(tmp_path / f"a{n}", model, rank=3 * n, seed=n)) for n in (1, 2)]
    recorder = _Recorder(model, adapters)
    drive(recorder, [prompt(n, 250) for n in (1, 33, 9)], 16, 8)
    kv = recorder.runner._attention._data  # pyright: ignore
    recording = tmp_path / "recording"
    recording.write_bytes(pickle.dumps(Recording(recorder.steps, recorder.outputs, kv)))
    arguments = {"model": str(model), "recording": str(recording), "same_host": True, "adapters": adapters}
    layouts = [(2, [3]), (1, [2, 1]), (2, [1, 2])]
    cases = [Case(tp, len(pp), {**arguments, "pp_layers": pp}) for tp, pp in layouts]
    expected = [token.token_id for output in recorder.outputs for token in output.sampled]
    for (tp, _), outcomes in zip(layouts, run_ranks("support.rank_jobs:replay", cases), strict=True):
        assert [outcome for outcome in outcomes if outcome.error or outcome.signal] == []
        assert outcomes[-tp].value["tokens"] == expected
        assert max(outcome.value["kv_error"] for outcome in outcomes) < 1e-4
