"""All layers as one native call: the same numbers as layer by layer, and layer by layer where something comes between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.lora_files import load_adapters, write_adapter
from support.oracle import make_tiny
from support.recording import Recorder
from support.runner_cases import drive, make_runner, prompt

from common.engine.runner import ModelRunner
from common.kernels.native.find import find_native
from common.model.decoder import DecoderModel
from common.model.native_stack import NativeStack

pytestmark = pytest.mark.skipif(find_native() is None, reason="no native kernels")


def runner_of(model: Path) -> ModelRunner:
    return make_runner(model, chooses_attention=True)


def stack_of(runner: ModelRunner) -> NativeStack:
    assert isinstance(runner._model, DecoderModel)
    [stack] = runner._model._layers
    assert isinstance(stack, NativeStack)
    return stack


def calls_of(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The native calls for layers that the runner makes from now on."""
    native, calls = stack_of(runner).native, list[str]()
    for name in ("layers_forward", "layer_attend"):
        function = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *args, f=function, n=name: (calls.append(n), f(*args))[1])
    return calls


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_call_computes_what_all_layers_do(family: str, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "model")
    prompts = [prompt(n, 250) for n in (1, 17, 40)]
    whole = Recorder(runner_of(model))
    drive(whole, prompts, 16, 8)
    by_layer = runner_of(model)
    layers: list[int] = []
    outputs = [by_layer.execute(step, layers.append) for step in whole.steps]
    assert layers == list(range(len(layers) // len(outputs))) * len(outputs)
    for one, other in zip(whole.outputs, outputs, strict=True):
        assert (one.sampled, one.prompt_logprobs) == (other.sampled, other.prompt_logprobs)


def test_steps_with_adapters_or_reports_run_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama", tmp_path / "model")
    runner = runner_of(model)
    load_adapters(runner._model, [str(write_adapter(tmp_path / "adapter", model, rank=4, seed=1))])
    recorder = Recorder(runner)
    drive(recorder, [prompt(5, 250)], 16, 1)
    [step] = recorder.steps
    calls = calls_of(runner, monkeypatch)
    num_layers = runner._model.config.num_layers
    runner.execute(step)
    assert calls == ["layers_forward"]
    calls.clear()
    runner.execute(step, lambda layer: None)
    runner.execute(replace(step, adapters=[1]))
    assert calls == ["layer_attend"] * (2 * num_layers)


def test_each_backend_has_its_own_memory(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model")
    first, second = runner_of(model), runner_of(model)
    second._model = first._model
    prompts = [prompt(n, 250) for n in (3, 20)]
    expected = [s.generated for s in drive(first, prompts, 16, 8)]
    assert [s.generated for s in drive(second, prompts, 16, 8)] == expected
    assert [s.generated for s in drive(first, prompts, 16, 8)] == expected
