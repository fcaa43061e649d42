"""A fingerprint covers all that decides what KV means, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_encoders import make_encoder

from common.config.option_groups import Quantization
from common.kernels.native.find import _OWN_SUMS
from common.model.config import load_model_config
from common.model.fingerprint import fingerprint, pooling_fingerprint, without_arithmetic
from common.model.pooling.open import read_pooling_config


def identity(path: Path, load_format: str = "auto", dtype: str = "float32", seed: int = 0) -> str:
    return fingerprint(path, load_model_config(path), load_format, dtype, seed)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_fingerprint_is_of_the_weights_not_of_their_place(folder: Path, originals: Path) -> None:
    assert identity(folder) == identity(originals / "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert identity(folder) == identity(originals / "llama")


def test_fingerprint_sees_every_tensor_the_config_the_dtype_and_the_tokenizer(folder: Path) -> None:
    seen = {
        identity(folder),
        identity(folder, dtype="bfloat16"),
        identity(folder, "dummy"),
        identity(folder, "dummy", seed=1),
    }
    for name in ("model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        rewrite(folder, lambda tensors, name=name: tensors[name].mul_(1.001))
        seen.add(identity(folder))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-5}))
    seen.add(identity(folder))
    (folder / "tokenizer.json").write_text("{}")
    seen.add(identity(folder))
    (folder / "tokenizer.json").write_text("{ }")
    seen.add(identity(folder))
    assert len(seen) == 10


def test_a_fingerprint_ends_with_what_a_refusal_must_name(folder: Path) -> None:
    def of(quantization: Quantization, arithmetic: str) -> str:
        return fingerprint(folder, load_model_config(folder), "auto", "bfloat16", 0, "cpu", quantization, arithmetic)

    assert of("int8", "amx") == of("auto", "") + "-int8-amx"


def test_weights_of_a_pooling_model_are_told_apart(folder: Path) -> None:
    """Their nodes registered the tokenizer alone: vectors of two fine-tunes were mixed, and `kvrelay admin check` found nothing."""

    def pooling(load_format: str = "auto", seed: int = 0, quantization: Quantization = "auto") -> str:
        config = read_pooling_config(folder, None)
        return pooling_fingerprint(folder, config, load_format, "auto", seed, quantization)

    seen = {pooling(), pooling("dummy"), pooling("dummy", 1), pooling(quantization="int8")}
    before = pooling()
    (folder / "README.md").write_text("other")
    assert pooling() == before
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].mul_(1.001))
    seen.add(pooling())
    assert len(seen) == 5


def test_pooling_models_of_equal_weights_but_other_vectors_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """One copy was changed from mean to cls, or computes in another type."""

    def pooling(path: Path, dtype: str = "auto", max_model_len: int | None = None) -> str:
        return pooling_fingerprint(path, read_pooling_config(path, max_model_len), "auto", dtype, 0, "auto")

    encoder = make_encoder(tmp_path / "bert")
    for path in (folder, encoder):
        before = pooling(path)
        assert pooling(path, max_model_len=8) == before
        config = json.loads((path / "config.json").read_text())
        eps = "rms_norm_eps" if path == folder else "layer_norm_eps"
        (path / "config.json").write_text(json.dumps({**config, eps: 1e-3}))
        other = pooling(path)
        (path / "1_Pooling").mkdir(exist_ok=True)
        (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
        assert len({before, other, pooling(path)}) == 3
    assert pooling(folder, "bfloat16") != pooling(folder)
    assert pooling(encoder, "bfloat16") == pooling(encoder)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_the_arithmetic_can_be_taken_off_again(folder: Path, quantization: Quantization) -> None:
    names = {"", *_OWN_SUMS.values()}
    config = load_model_config(folder)
    made = {name: fingerprint(folder, config, "auto", "bfloat16", 0, "cpu", quantization, name) for name in names}
    assert len(set(made.values())) == len(names)
    assert {without_arithmetic(each) for each in made.values()} == {made[""]}
