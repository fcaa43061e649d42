"""`suffix`: fill in the middle, with the tokens of models that were trained for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fallback_tokenizers import make_fallback_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from common.base.errors import BadRequest
from router.http.openai.build_request import Caller, completion_generation
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.parse_body import completion_request
from router.models.served_model import LoadOptions, load
from router.text.tokenizer import Tokenizer as ServedTokenizer

WORDS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "def", "return", "x"]
MODEL = load("demo", None, LoadOptions())
BOS = MODEL.tokenizer.token_id("<|bos|>")


def _of_words(words: list[str]) -> Tokenizer:
    raw = Tokenizer(models.WordLevel({word: token_id for token_id, word in enumerate(words)}, unk_token="x"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([word for word in words if word.startswith("<|")])
    return raw


def _prompt_ids(folder: Path, raw: Tokenizer, suffix: str, prompt: str = "def x") -> list[int]:
    raw.save(str(folder / "tokenizer.json"))
    served = replace(MODEL, tokenizer=ServedTokenizer(folder))
    body = completion_request({"prompt": prompt, "suffix": suffix}, CompletionRequest)
    return completion_generation(body, served, body.prompt[0], Caller()).engine.prompt_ids.tolist()


def test_a_suffix_is_put_behind_the_prompt_with_the_models_tokens(tmp_path: Path) -> None:
    assert _prompt_ids(tmp_path, _of_words(WORDS), "return x") == [0, 3, 5, 1, 4, 5, 2]


def test_the_gap_may_be_at_the_beginning(tmp_path: Path) -> None:
    assert _prompt_ids(tmp_path, _of_words(WORDS), "return x", "") == [0, 1, 4, 5, 2]


def test_a_suffix_begins_without_a_space_of_the_tokenizers(tmp_path: Path) -> None:
    """As in CodeLlama's own code, where only the text before the gap has one."""
    raw = make_fallback_tokenizer(["▁<PRE>", "▁<SUF>", "▁<MID>"])
    after = [raw.token_to_id(text) for text in ("<0x0A>", "y")]
    before = [raw.token_to_id(text) for text in ("▁", "d", "e", "f", "▁", "x")]
    assert _prompt_ids(tmp_path, raw, "\ny") == [1, *before, 2, *after, 3]


def test_a_model_without_such_tokens_refuses_a_suffix(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="suffix"):
        _prompt_ids(tmp_path, _of_words(WORDS[3:]), "return x")


def test_a_prompt_without_text_has_the_tokens_that_the_tokenizer_adds() -> None:
    body = completion_request({"prompt": ["", "x"]}, CompletionRequest)
    assert completion_generation(body, MODEL, body.prompt[0], Caller()).engine.prompt_ids.tolist() == [BOS]
    bare = completion_request({"prompt": "", "add_special_tokens": False}, CompletionRequest)
    with pytest.raises(BadRequest, match="empty"):
        completion_generation(bare, MODEL, bare.prompt[0], Caller())
    for nothing in ([], [[]], [[1], []]):
        with pytest.raises(BadRequest, match="must not be empty"):
            completion_request({"prompt": nothing}, CompletionRequest)
