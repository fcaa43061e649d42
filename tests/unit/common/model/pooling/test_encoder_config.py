"""What is read of an encoder's folder, and what is refused at the start in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_encoders import make_encoder

from common.base.errors import ConfigError
from common.model.pooling.bert import Encoder
from common.model.pooling.encoder_config import read_encoder_config
from common.model.pooling.open import read_pooling_config


def change(file: Path, **values: Any) -> None:
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, **values}))


def test_context_and_pooling_are_those_of_the_files(tmp_path: Path) -> None:
    bert = make_encoder(tmp_path / "bert", pooling="cls")
    found = read_encoder_config(bert)
    assert (found.max_model_len, found.padding_id, found.pooling) == (64, None, "cls")
    (bert / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    assert read_encoder_config(bert).max_model_len == 32
    roberta = read_encoder_config(make_encoder(tmp_path / "roberta", "Roberta"))
    assert (roberta.max_model_len, roberta.padding_id, roberta.pooling) == (64, 1, "mean")
    change(tmp_path / "roberta" / "config.json", pad_token_id=0)
    assert read_encoder_config(tmp_path / "roberta").max_model_len == 65


def test_the_context_is_the_tokenizers_where_sentence_transformers_notes_none(tmp_path: Path) -> None:
    """As in sentence-transformers, which writes it nowhere else since version 6."""
    folder = make_encoder(tmp_path / "bert")
    for limit, expected in ((48, 48), (int(1e30), 64), (1e30, 64), (None, 64), (0, 64)):
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
        assert read_encoder_config(folder).max_model_len == expected
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 48}')
    (folder / "sentence_roberta_config.json").write_text('{"max_seq_length": 32}')
    assert read_encoder_config(folder).max_model_len == 32


def test_the_settings_of_pooling_are_where_modules_json_says(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "bert", pooling="cls")
    (folder / "1_Pooling").rename(folder / "pool")
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "pool"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert read_encoder_config(folder).pooling == "cls"


@pytest.mark.parametrize(("name", "is_told"), [("query", True), ("document", False), (None, False)])
def test_a_prompt_that_sentence_transformers_puts_before_every_text_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str | None, is_told: bool
) -> None:
    folder = make_encoder(tmp_path / "bert")
    (folder / "modules.json").write_text(json.dumps([{"type": "a.Transformer", "path": ""}]))
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": name}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    read_pooling_config(folder, None)
    assert ("puts 'query: ' before every text" in caplog.text) == is_told


def two_labels(folder: Path) -> None:
    change(folder / "config.json", id2label={"0": "a", "1": "b"}, architectures=["BertForSequenceClassification"])


def dense(folder: Path) -> None:
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Dense"]
    (folder / "modules.json").write_text(json.dumps([{"type": kind} for kind in kinds]))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (
            lambda folder: change(folder / "config.json", num_attention_heads=5),
            "is not a multiple of num_attention_heads",
        ),
        (lambda folder: change(folder / "config.json", hidden_act="swish"), "hidden_act 'swish' is not supported"),
        (lambda folder: change(folder / "config.json", position_embedding_type="relative_key"), "is not supported"),
        (lambda folder: change(folder / "config.json", is_decoder=True), "is_decoder, .* is not supported"),
        (two_labels, "has one label, this model 2"),
        (dense, "the module Dense is not supported"),
        (
            lambda folder: (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}'),
            "do_lower_case of sentence-transformers is not supported",
        ),
        (lambda folder: (folder / "modules.json").write_text("{"), "is not a list of sentence-transformers' modules"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json in"),
        (lambda folder: change(folder / "1_Pooling" / "config.json", pooling_mode_cls_token=True), "exactly one of"),
        (
            lambda folder: change(folder / "1_Pooling" / "config.json", pooling_mode_weightedmean_tokens=True),
            "exactly one of",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, spoil: Callable[[Path], object], why: str) -> None:
    folder = make_encoder(tmp_path / "bert")
    spoil(folder)
    with pytest.raises(ConfigError, match=why):
        read_encoder_config(folder)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "bert")
    change(folder / "config.json", intermediate_size=65)
    with pytest.raises(ConfigError, match="implies"):
        Encoder(folder, read_encoder_config(folder))


@pytest.mark.parametrize(
    ("noted", "activation"),
    [
        ({}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_the_activation_of_scores_is_that_of_sentence_transformers(
    tmp_path: Path, noted: dict[str, Any], activation: str
) -> None:
    folder = make_encoder(tmp_path / "cross", labels=1)
    change(folder / "config.json", **noted)
    assert read_encoder_config(folder).score_activation == activation


def test_the_activation_that_sentence_transformers_6_notes_goes_first(tmp_path: Path) -> None:
    """It keeps it beside modules.json: scores were the sigmoid of what they are there."""
    folder = make_encoder(tmp_path / "cross", labels=1)
    change(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"})
    noted = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(noted))
    assert read_encoder_config(folder).score_activation == "sigmoid"
    modules = [{"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert read_encoder_config(folder).score_activation == "identity"


def test_an_activation_that_is_not_implemented_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "cross", labels=1)
    change(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    with pytest.raises(ConfigError, match=r"activation 'torch\.nn\.modules\.activation\.Tanh' is not supported"):
        read_encoder_config(folder)
