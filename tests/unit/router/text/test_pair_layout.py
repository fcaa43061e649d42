"""Pairs of texts as the tokenizers library joins them, and texts as it cuts them."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from support.stub_node import make_model_folder
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors

from common.base.errors import ConfigError
from common.control.messages import ModelInfo
from router.models.served_model import LoadOptions, load_pooling
from router.text.tokenizer import Tokenizer

_WORDS = ["a", "b", "[CLS]", "[SEP]", "[UNK]"]
_SPECIAL = [("[CLS]", 2), ("[SEP]", 3)]
_PROCESSORS = {
    "none": None,
    "bert": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "types": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=_SPECIAL
    ),
    "no separator": processors.TemplateProcessing(single="$A", pair="$A $B [SEP]", special_tokens=_SPECIAL),
    "turned": processors.TemplateProcessing(single="$A", pair="$B:1 [SEP]:1 $A", special_tokens=_SPECIAL),
}


def _tokenizer(folder: Path, name: str) -> tuple[Tokenizer, RawTokenizer]:
    raw = RawTokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if (processor := _PROCESSORS[name]) is not None:
        raw.post_processor = processor
    model = make_model_folder(folder / "model")
    (model / "tokenizer.json").write_text(raw.to_str())
    (model / "tokenizer_config.json").write_text(json.dumps({}))
    return Tokenizer(model), raw


@pytest.mark.parametrize("name", _PROCESSORS)
def test_pairs_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    tokenizer, raw = _tokenizer(tmp_path, name)
    texts = ["", "a", "b a", "a b a b b"]
    for first in texts:
        for second, (ids, second_at) in zip(texts, tokenizer.encode_pairs(first, texts), strict=True):
            parts = raw.encode_batch([first, second], add_special_tokens=False)
            expected = raw.post_process(parts[0], parts[1])
            assert ids == expected.ids
            assert second_at == (expected.type_ids.index(1) if 1 in expected.type_ids else 0)


@pytest.mark.parametrize("name", _PROCESSORS)
def test_the_longer_text_is_cut_as_by_the_library(name: str, tmp_path: Path) -> None:
    """Where both were cut and the room was odd, as BERT's 509 tokens are, the first one kept one token more."""
    tokenizer, raw = _tokenizer(tmp_path, name)
    special = raw.num_special_tokens_to_add(is_pair=True)
    for first, second, room in itertools.product(range(10), range(10), range(2, 10)):
        limit = room + special
        raw.enable_truncation(limit, strategy="longest_first")
        (pair,) = tokenizer.encode_pairs("a " * first, ["b " * second], limit=limit)
        assert pair.token_ids == raw.encode("a " * first, "b " * second).ids


@pytest.mark.parametrize("name", _PROCESSORS)
def test_a_text_is_cut_as_by_the_library_without_encoding_it_again(name: str, tmp_path: Path) -> None:
    tokenizer, raw = _tokenizer(tmp_path, name)
    special = raw.num_special_tokens_to_add(is_pair=False)
    for words, room, side in itertools.product(range(8), range(1, 8), ("right", "left")):
        text = "a b b " * words
        (ids,) = tokenizer.encode_batch([text])
        raw.enable_truncation(room + special, direction=side)
        assert tokenizer.cut(ids, room + special, keep_last=side == "left") == raw.encode(text).ids
        assert tokenizer.cut(ids, 1) == raw.encode("").ids[:1] or not special


def test_a_long_text_is_encoded_once(tmp_path: Path) -> None:
    tokenizer, _ = _tokenizer(tmp_path, "bert")
    began_s = time.process_time()
    pairs = list(tokenizer.encode_pairs("a " * 100_000, ["b"] * 500, limit=64))
    assert {len(pair.token_ids) for pair in pairs} == {64}
    assert time.process_time() - began_s < 5.0


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [("token", "no entry found for key"), ("text", "its post-processor leaves a text out of pairs")],
)
def test_a_cross_encoder_whose_pairs_cannot_be_encoded_is_refused_when_it_is_loaded(
    tmp_path: Path, left_out: str, reason: str
) -> None:
    _tokenizer(tmp_path, "no separator")
    file = tmp_path / "model" / "tokenizer.json"
    raw = json.loads(file.read_text())
    if left_out == "token":
        raw["post_processor"]["special_tokens"] = {}
    else:
        del raw["post_processor"]["pair"][1]
    file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=rf"cannot load .*tokenizer\.json: {reason}"):
        load_pooling(ModelInfo("m", str(tmp_path / "model"), len(_WORDS), 64, task="score"), LoadOptions())
