"""`suffix`: fill in the middle, with the tokens of models that were trained for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from common.base.errors import BadRequest
from router.http.openai.build_request import Caller, completion_generation
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.parse_body import completion_request
from router.served_model import LoadOptions, load
from router.text.tokenizer import Tokenizer as ServedTokenizer

WORDS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "def", "return", "x"]
MODEL = load("demo", None, LoadOptions())


def _prompt_ids(folder: Path, words: list[str], suffix: str) -> list[int]:
    raw = Tokenizer(models.WordLevel({word: token_id for token_id, word in enumerate(words)}, unk_token="x"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([word for word in words if word.startswith("<|")])
    raw.save(str(folder / "tokenizer.json"))
    served = replace(MODEL, tokenizer=ServedTokenizer(folder))
    body = completion_request({"prompt": "def x", "suffix": suffix}, CompletionRequest)
    return completion_generation(body, served, body.prompt[0], Caller("", "")).engine.prompt_ids.tolist()


def test_a_suffix_is_put_behind_the_prompt_with_the_models_tokens(tmp_path: Path) -> None:
    assert _prompt_ids(tmp_path, WORDS, "return x") == [0, 3, 5, 1, 4, 5, 2]


def test_a_model_without_such_tokens_refuses_a_suffix(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="suffix"):
        _prompt_ids(tmp_path, WORDS[3:], "return x")
