"""A second kind of attention plugs in by registration: other planes, weights and backends (`support.latent_attention`)."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from support import latent_attention
from support.latent_attention import LATENT, ROPE, VOCAB, SmallLatentDescription, reference_logits
from support.rank_processes import Case, run_ranks
from support.recording import Recorder
from support.runner_cases import drive, make_runner, prompt

from common.base.errors import ConfigError
from common.kv.spec import KVPlane
from common.model.config import load_model_config
from common.model.fingerprint import fingerprint
from common.model.kv_spec import kv_spec
from common.model.lora.checkpoint import linear_shapes
from common.model.sharding import check_parallel, lm_head_in_layers

PROMPTS = [prompt(length, VOCAB) for length in (1, 17, 40)]
WANT = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    latent_attention.register(monkeypatch.setitem)
    return latent_attention.write_model(tmp_path / "model")


def test_each_kind_has_a_layer_group_of_its_own_planes(folder: Path) -> None:
    usual, latent = kv_spec(load_model_config(folder), "float32").groups
    assert (usual.layers, usual.num_heads) == ((0, 2), 2)
    assert (latent.layers, latent.num_heads) == ((1, 3), 1)
    assert latent.planes == (KVPlane("latent", LATENT), KVPlane("rope", ROPE))


def test_its_description_says_how_it_is_split_and_what_its_weights_are(folder: Path) -> None:
    config = load_model_config(folder)
    with pytest.raises(ConfigError, match=r"does not fit 4 query heads; sizes that would work: \[1, 2, 4\]"):
        check_parallel(config, 3)
    only_latent = replace(config, layers=config.layers[1::2])
    with pytest.raises(ConfigError, match="does not fit 4 heads over latents"):
        check_parallel(only_latent, 3)
    assert linear_shapes(config, 1)["self_attn.kv_proj"] == (LATENT + ROPE, 64)
    assert lm_head_in_layers(only_latent) == pytest.approx(250 / (4 * 32 + 32 + 4 * 24 + 3 * 96))
    digest = fingerprint(folder, config, "dummy", "float32", 0)
    as_if_other = replace(
        config, layers=tuple(replace(layer, attention=_Twin.of(layer.attention)) for layer in config.layers)
    )
    assert digest != fingerprint(folder, as_if_other, "dummy", "float32", 0)


class _Twin(SmallLatentDescription):
    """A kind with the same fields."""

    kind = "twin"

    @classmethod
    def of(cls, attention: object) -> object:
        return cls(**vars(attention)) if isinstance(attention, SmallLatentDescription) else attention


@pytest.mark.parametrize("chunk", [7, 100])
def test_a_model_of_both_kinds_draws_what_plain_operations_draw(folder: Path, chunk: int) -> None:
    sequences = drive(make_runner(folder, chooses_attention=True), PROMPTS, chunk, WANT)
    for tokens, sequence in zip(PROMPTS, sequences, strict=True):
        whole = tokens + sequence.generated
        logits = reference_logits(folder, whole)[len(tokens) - 1 : -1]
        assert sequence.generated == logits.argmax(-1).tolist()
        assert sequence.logprobs == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4)


def test_ranks_share_a_model_of_both_kinds(folder: Path) -> None:
    recorder = Recorder(make_runner(folder, chooses_attention=True))
    drive(recorder, PROMPTS, 16, WANT)
    steps = folder / "steps"
    steps.write_bytes(pickle.dumps(recorder.steps))
    layouts = [(2, [4]), (1, [1, 3]), (4, [3, 1])]
    cases = [Case(tp, len(pp), {"model": str(folder), "steps": str(steps), "pp_layers": pp}) for tp, pp in layouts]
    expected = [token.token_id for output in recorder.outputs for token in output.sampled]
    for (tp, _), outcomes in zip(layouts, run_ranks("support.latent_attention:replay", cases), strict=True):
        assert [outcome for outcome in outcomes if outcome.error or outcome.signal] == []
        assert outcomes[-tp].value == expected


def test_a_kind_that_nothing_implements_is_refused_when_the_model_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(latent_attention.ATTENTIONS, "small_latent")
    with pytest.raises(
        ConfigError,
        match="needs the attention 'small_latent', which is not implemented; implemented: multi_head, latent",
    ):
        make_runner(folder)
