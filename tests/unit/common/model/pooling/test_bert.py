"""Encoders against transformers, with the native kernels and with PyTorch's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_encoders import Family, make_encoder

from common.base.errors import ConfigError
from common.base.variables import CPU_KERNELS
from common.control.identities import AttemptKey, pack_ids
from common.control.pooling import PoolInput, PoolRequest
from common.model.pooling.bert import Encoder
from common.model.pooling.encoder_config import read_encoder_config
from common.model.pooling.pooler import Pooler

# RoBERTa's padding token (1) may be in a text.
INPUTS = [
    PoolInput(pack_ids([4, 5, 6, 2])),
    PoolInput(pack_ids([4])),
    PoolInput(pack_ids([4, 7, 2, 8, 9, 2]), second_at=3),
    PoolInput(pack_ids([4, 9, 8, 2])),
    PoolInput(pack_ids([1, 4, 1, 1, 9, 2])),
    PoolInput(pack_ids([4, *[4 + i % 20 for i in range(62)], 2])),
]


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(CPU_KERNELS, "torch" if request.param == "torch" else "")
    return request.param


def load(folder: Path) -> Encoder:
    return Encoder(folder, read_encoder_config(folder))


def types(each: PoolInput) -> torch.Tensor:
    place = each.second_at or len(each.token_ids)
    return torch.tensor([[int(index >= place) for index in range(len(each.token_ids))]])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_a_batch_of_several_lengths_has_the_hidden_states_of_each_alone(tmp_path: Path, family: Family) -> None:
    folder = make_encoder(tmp_path / "model", family)
    oracle = transformers.AutoModel.from_pretrained(folder).eval()
    hidden, lengths = load(folder).hidden(INPUTS)
    assert lengths == [len(each.token_ids) for each in INPUTS]
    for each, rows in zip(INPUTS, hidden.split(lengths), strict=True):
        kind = types(each) if family == "Bert" else torch.zeros_like(types(each))
        with torch.no_grad():
            mask = torch.ones_like(kind)
            expected = oracle(torch.tensor([each.token_ids]), mask, token_type_ids=kind).last_hidden_state[0]
        torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_scores_are_the_logits_of_transformers_behind_the_activation(tmp_path: Path, activation: str) -> None:
    folder = make_encoder(tmp_path / "model", labels=1)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "sbert_ce_default_activation_function": activation}))
    oracle = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoder = load(folder)
    _, scores = encoder.scores(*encoder.hidden(INPUTS))
    with torch.no_grad():
        logits = [oracle(torch.tensor([each.token_ids]), token_type_ids=types(each)).logits[0, 0] for each in INPUTS]
    expected = torch.stack(logits)
    expected = expected if activation == "Identity" else torch.sigmoid(expected)
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=1e-4)


def test_a_request_may_ask_for_scores_before_the_activation(tmp_path: Path) -> None:
    encoder = load(make_encoder(tmp_path / "model", labels=1))
    logits, _ = encoder.scores(*encoder.hidden(INPUTS))
    requests = [PoolRequest(AttemptKey("r", 1), [], normalize=index % 2 == 0) for index in range(len(INPUTS))]
    found = Pooler(encoder).compute(list(zip(requests, INPUTS, strict=True)))
    for index, (each, logit) in enumerate(zip(found, logits, strict=True)):
        expected = torch.sigmoid(logit) if index % 2 == 0 else logit
        torch.testing.assert_close(torch.frombuffer(bytearray(each), dtype=torch.float32)[0], expected)


def test_norms_under_the_names_of_tensorflow_are_read_as_in_transformers(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model")
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for new, old in older.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    oracle = transformers.AutoModel.from_pretrained(folder).eval()
    hidden, _ = load(folder).hidden(INPUTS[:1])
    with torch.no_grad():
        expected = oracle(torch.tensor([INPUTS[0].token_ids])).last_hidden_state[0]
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-4)


def test_weights_of_whole_numbers_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layer.1.output.dense.weight"))
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(ConfigError, match=r"layer\.1\.output\.dense\.weight is torch\.int8"):
        load(folder)
