"""Models that classes of transformers compute, spread over ranks: the tokens, log-probabilities and KV of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.generic_models import config_of
from support.oracle import write_model
from support.rank_processes import Case, run_ranks
from support.recording import Recorder
from support.runner_cases import drive, make_runner, prompt

from common.base.errors import ConfigError
from common.model.choose import choose_model
from common.model.sharding import check_parallel

LAYOUTS: dict[str, list[tuple[int, list[int]]]] = {
    "phi3": [(2, [1, 2])],
    "llama": [(2, [3]), (4, [3]), (2, [2, 1])],
    "qwen3_moe": [(2, [3]), (1, [1, 1, 1])],
    "mixtral": [(2, [2, 1])],
    "olmo2": [(4, [3])],
    "deepseek_v3": [(2, [3]), (1, [2, 1])],
    "glm4": [(2, [2, 1])],
    "phi": [(4, [1, 2])],
    "gpt_neox": [(2, [1, 2])],
    "nemotron": [(2, [3])],
    "ernie4_5_moe": [(2, [1, 2])],
}
"""Per kind, ranks of a stage and layers of each stage. KV heads: 2, of experts' models with latent attention 4."""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_draws_what_one_rank_draws(kind: str, tmp_path: Path) -> None:
    folder = write_model(config_of(kind), tmp_path / kind)
    recorder = Recorder(make_runner(folder, model_impl="transformers"))
    drive(recorder, [prompt(n, 250) for n in (1, 33)], 16, 8)
    recording = tmp_path / "recording"
    recorder.write(recording)
    arguments = {"model": str(folder), "recording": str(recording), "same_host": True, "model_impl": "transformers"}
    layouts = LAYOUTS[kind]
    cases = [Case(tp, len(pp), {**arguments, "pp_layers": pp}) for tp, pp in layouts]
    expected = [token for output in recorder.outputs for token in output.sampled]
    for (tp, _), outcomes in zip(layouts, run_ranks("support.rank_jobs:replay", cases), strict=True):
        assert [outcome for outcome in outcomes if outcome.error or outcome.signal] == []
        last = outcomes[-tp].value
        assert last["tokens"] == [token.token_id for token in expected]
        assert last["logprobs"] == pytest.approx([t.logprobs.logprob for t in expected if t.logprobs], abs=1e-4)
        assert max(outcome.value["kv_error"] for outcome in outcomes) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "mixtral"])
def test_context_parallel_ranks_share_out_rows(kind: str, tmp_path: Path) -> None:
    folder = write_model(config_of(kind), tmp_path / kind)
    recorder = Recorder(make_runner(folder, model_impl="transformers"))
    drive(recorder, [prompt(n, 250) for n in (1, 150, 33)], 90, 8)
    recording = tmp_path / "recording"
    recorder.write(recording)
    arguments = {"model": str(folder), "recording": str(recording), "same_host": True, "model_impl": "transformers"}
    [outcomes] = run_ranks("support.rank_jobs:replay", [Case(1, 1, {**arguments, "pp_layers": [3]}, cp=2)])
    assert [outcome for outcome in outcomes if outcome.error or outcome.signal] == []
    expected = [token.token_id for output in recorder.outputs for token in output.sampled]
    assert outcomes[0].value["tokens"] == expected
    assert max(outcome.value["kv_error"] for outcome in outcomes) < 1e-4


def test_a_class_without_plans_is_refused_on_several_ranks(tmp_path: Path) -> None:
    config = choose_model(write_model(config_of("opt"), tmp_path), "transformers")
    with pytest.raises(ConfigError, match="no tensor-parallel plan for OPTForCausalLM: use --tensor-parallel-size 1"):
        check_parallel(config, 2)
    with pytest.raises(ConfigError, match="no pipeline plan for OPTForCausalLM: use --pipeline-parallel-size 1"):
        check_parallel(config, 1, (2, 1))
