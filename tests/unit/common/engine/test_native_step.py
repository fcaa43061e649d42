"""Decode steps as one native call: the same numbers as layer by layer, and other steps as before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.oracle import make_tiny
from support.recording import Recorder
from support.runner_cases import drive, make_runner, prompt

from common.base.errors import EngineError
from common.engine.runner import ModelRunner
from common.engine.step import RelayProgress, ScoredRows, StepInput
from common.kernels.native.find import find_native

pytestmark = pytest.mark.skipif(find_native() is None, reason="no native kernels")

PROMPTS = [prompt(n, 250) for n in (1, 17, 40)]


def recorded(model: Path) -> Recorder:
    """All prompts in chunks, then several steps in which all sequences decode."""
    recorder = Recorder(make_runner(model, chooses_attention=True))
    drive(recorder, PROMPTS, 16, 8)
    return recorder


def is_decode(step: StepInput) -> bool:
    return len(step.token_ids) == step.num_decode_seqs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_one_call_computes_what_all_layers_do(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = find_native()
    assert native is not None
    calls: list[int] = []
    forward = native.model_forward
    monkeypatch.setattr(native, "model_forward", lambda *args: (calls.append(1), forward(*args))[1])
    one = recorded(make_tiny(family, tmp_path / "model"))
    assert len(calls) == sum(map(is_decode, one.steps)) > 3
    by_layer = make_runner(tmp_path / "model", chooses_attention=True)
    for step, output in zip(one.steps, one.outputs, strict=True):
        other = by_layer.execute(step, lambda layer: None)
        assert (output.sampled, output.prompt_logprobs) == (other.sampled, other.prompt_logprobs)


def test_only_steps_in_which_every_sequence_decodes_one_known_token_are_one_call(tmp_path: Path) -> None:
    recorder = recorded(make_tiny("llama", tmp_path / "model"))
    native = recorder.runner._native_step
    assert native is not None
    assert [native.takes(step) for step in recorder.steps] == [is_decode(step) for step in recorder.steps]
    step = next(step for step in recorder.steps if is_decode(step))
    params = step.samples[0].params
    for other in (
        replace(step, adapters=[1] * len(step.query_lens)),
        replace(step, placeholders=[(0, 0)], placeholder_step=step.step_id - 1),
        replace(step, scored=[ScoredRows(0, 0, [1], 0)]),
        replace(step, relay=[RelayProgress(("a", 1), 1)]),  # type: ignore[arg-type]
        replace(step, samples=step.samples[1:]),
    ):
        assert not native.takes(other), (other, params)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "granite"])
def test_a_model_with_a_part_that_the_kernels_lack_has_no_such_step(family: str, tmp_path: Path) -> None:
    assert make_runner(make_tiny(family, tmp_path / "model"), chooses_attention=True)._native_step is None


@pytest.mark.parametrize("change", ["token", "block", "slot", "position", "context"])
def test_a_wrong_step_is_refused_and_the_next_one_is_right(change: str, tmp_path: Path) -> None:
    recorder = recorded(make_tiny("llama", tmp_path / "model"))
    runner: ModelRunner = recorder.runner
    step, expected = recorder.steps[-1], recorder.outputs[-1].sampled
    assert is_decode(step)
    [tables], [slots] = step.block_tables, step.slot_mapping
    wrong = {
        "token": replace(step, token_ids=[*step.token_ids[:-1], 1 << 20]),
        "block": replace(step, block_tables=[[*tables[:-1], [1 << 20] * len(tables[-1])]]),
        "slot": replace(step, slot_mapping=[[*slots[:-1], -1]]),
        "position": replace(step, positions=step.positions[:-1]),
        "context": replace(step, context_lens=[*step.context_lens[:-1], 0]),
    }
    with pytest.raises(EngineError, match=r"outside|fit|no rows"):
        runner.execute(wrong[change])
    assert runner.execute(step).sampled == expected
