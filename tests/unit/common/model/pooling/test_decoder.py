"""Decoders that pool, against transformers: hidden states of each text in a batch, and the vectors of their last tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.base.variables import CPU_KERNELS
from common.control.identities import AttemptKey, pack_ids
from common.control.pooling import PoolInput, PoolRequest
from common.model.loader import load_model
from common.model.pooling.decoder import PoolingDecoder
from common.model.pooling.decoder_config import read_pooling_decoder
from common.model.pooling.pooler import Pooler

INPUTS = [
    PoolInput(pack_ids([(7 + seed * 31 + 11 * i) % 250 for i in range(length)]))
    for seed, length in enumerate((3, 1, 40, 3))
]


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_KERNELS, "torch" if request.param == "torch" else "")


def embedding_model(folder: Path, name: str = "qwen3", *, headless: bool = False) -> Path:
    """A decoder as sentence-transformers keeps Qwen3-Embedding: no LM head, names without `model.`."""
    path = make_tiny(name, folder)
    for file in path.glob("*.safetensors"):
        tensors = {key.removeprefix("model."): value for key, value in load_file(file).items() if "lm_head" not in key}
        save_file(tensors, file)
    for file in path.glob("*.index.json"):
        file.unlink()
    if headless:
        change(path, architectures=["Qwen3Model"])
    return path


def change(path: Path, **values: Any) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **values}))


def load(path: Path) -> PoolingDecoder:
    config = read_pooling_decoder(path)
    options = {"dtype": "auto", "load_format": "auto", "seed": 0, "small_batches": False}
    return PoolingDecoder(load_model(path, config.model, lm_head=False, **options), config)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("headless", [False, True])
def test_last_tokens_of_a_batch_are_those_of_transformers(tmp_path: Path, headless: bool) -> None:
    oracle = transformers.AutoModel.from_pretrained(make_tiny("qwen3", tmp_path / "whole")).eval()
    model = load(embedding_model(tmp_path / "model", headless=headless))
    found = Pooler(model).compute([(PoolRequest(AttemptKey("a", 1), []), each) for each in INPUTS])
    for each, vector in zip(INPUTS, found, strict=True):
        with torch.no_grad():
            last = oracle(torch.tensor([each.token_ids])).last_hidden_state[0, -1]
        expected = (last / last.norm()).numpy()
        np.testing.assert_allclose(np.frombuffer(vector, np.float32), expected, atol=2e-5)


@pytest.mark.parametrize("headless", [False, True])
def test_gpt2_whose_class_with_a_head_is_called_a_model_embeds(tmp_path: Path, headless: bool) -> None:
    path = make_tiny("gpt2", tmp_path / "model")
    oracle = transformers.AutoModel.from_pretrained(path).eval()
    if headless:
        oracle.save_pretrained(path)
    hidden, lengths = load(path).hidden(INPUTS)
    for each, rows in zip(INPUTS, hidden.split(lengths), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([each.token_ids])).last_hidden_state[0]
        torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "architecture"), [("mistral", "MistralModel"), ("gemma3", "Gemma3TextModel")])
def test_texts_longer_than_a_sliding_window_embed_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, architecture: str
) -> None:
    monkeypatch.setattr("common.model.pooling.decoder._ROWS", 32)
    path = make_tiny(name, tmp_path / "model")
    oracle = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    change(path, architectures=[architecture])
    inputs = [PoolInput(pack_ids([(5 + 7 * i) % 250 for i in range(length)])) for length in (100, 24, 25, 100, 41, 40)]
    hidden, lengths = load(path).hidden(inputs)
    for each, rows in zip(inputs, hidden.split(lengths), strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([each.token_ids])).last_hidden_state[0]
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


def test_the_pooling_of_sentence_transformers_replaces_that_of_the_last_token(tmp_path: Path) -> None:
    path = embedding_model(tmp_path / "model")
    assert read_pooling_decoder(path).pooling == "lasttoken"
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    config = read_pooling_decoder(path)
    assert (config.pooling, config.max_model_len) == ("mean", 32)
    assert config.with_context(16).max_model_len == 16


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gemma2", {}, "soft caps of scores are not supported"),
        ("qwen3", {"is_causal": False}, "not causal is not supported"),
        ("qwen3", {"use_bidirectional_attention": True}, "not causal is not supported"),
        ("qwen3", {"architectures": ["FalconModel"]}, "FalconModel.* is not supported"),
    ],
)
def test_what_would_give_other_vectors_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], why: str) -> None:
    path = make_tiny(name, tmp_path / "model")
    change(path, **changes)
    with pytest.raises(ConfigError, match=why):
        read_pooling_decoder(path)
