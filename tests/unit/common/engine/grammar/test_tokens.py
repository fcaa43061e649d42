"""The tokens that grammars are made of: read from a tokenizer.json as llguidance itself reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fallback_tokenizers import make_fallback_tokenizer
from tokenizers import Tokenizer, pre_tokenizers

from common.engine.grammar.compile import byte_level_tokens, compile_grammar, load_tokenizer, parsed_tokens
from common.model.hub import resolve_model
from router.text.tokenizer import Tokenizer as RouterTokenizer

DEMO = Path(resolve_model("demo"))


def _file(folder: Path, **changes: Any) -> Path:
    """The demo model's tokenizer.json with other entries."""
    parts = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**parts, **changes}), "utf-8")
    return file


@pytest.mark.parametrize("more", [0, 37])
def test_byte_level_tokens_are_read_as_llguidance_reads_them(more: int) -> None:
    file = DEMO / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size() + more
    tokens = byte_level_tokens(tokenizer, size)
    assert tokens == parsed_tokens(file, size)
    assert tokens is not None
    assert {bytes([byte]) for byte in range(0xFF)} <= set(tokens), "every byte is a token"


@pytest.mark.parametrize("scheme", [None, "first", "always"])
@pytest.mark.parametrize(
    ("grammar", "forced"),
    [
        ('start: "abc def" /[xy]/', list("abc▁def")),
        ('start: " abc" | " abd"', list("▁ab")),
        ('start: "</s>" /[xy]/', list("</s>")),
    ],
)
def test_forced_texts_begin_without_the_space_that_sentencepiece_adds(
    tmp_path: Path, scheme: str | None, grammar: str, forced: list[str]
) -> None:
    """With the tokenizers of Llama 2, Mistral and Phi-3 no grammar could be compiled that forces its first characters."""
    raw = make_fallback_tokenizer(["<s>", "</s>"])
    if scheme is not None:
        raw.normalizer = None
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    raw.save(str(tmp_path / "tokenizer.json"))
    size = raw.get_vocab_size()
    for tokenizer in load_tokenizer(tmp_path, size, [2]), RouterTokenizer(tmp_path).for_grammars(size, [2]):
        matcher = compile_grammar(tokenizer, grammar)
        ids = matcher.compute_ff_tokens()
        assert [raw.id_to_token(token_id) for token_id in ids] == forced
        assert matcher.consume_tokens(ids)


_ADDED = {
    "<think>": False,
    "<|end|>": True,
    "stop": True,
    "[TOOL]": False,
    "Ġab": False,
    "日本": False,
    "a b": False,
    "<x": False,
}
"""Content of an added token, and whether it is special."""


def test_added_tokens_are_text_or_special_as_llguidance_takes_them(tmp_path: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": 2048 + number, "content": content, "special": special, **flags}
        for number, (content, special) in enumerate(_ADDED.items())
    ]
    parts = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    file = _file(tmp_path, added_tokens=parts["added_tokens"] + added)
    size = 2048 + len(added)
    tokens = byte_level_tokens(Tokenizer.from_file(str(file)), size)
    assert tokens == parsed_tokens(file, size)
    assert tokens is not None
    assert tokens[2048:2051] == [b"\xff<think>", b"\xff<|end|>", b"\xffstop"]


@pytest.mark.parametrize("token", ["日本", "a b", "\x80"])
def test_a_token_with_a_character_that_stands_for_no_byte_is_left_to_llguidance(tmp_path: Path, token: str) -> None:
    model = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))["model"]
    file = _file(tmp_path, model={**model, "vocab": {**model["vocab"], token: 2048}})
    assert byte_level_tokens(Tokenizer.from_file(str(file)), 2049) is None
    assert load_tokenizer(tmp_path, 2049, [1]).vocab_size == 2049


def test_other_decoders_and_vocabularies_that_are_too_large_are_left_to_llguidance(tmp_path: Path) -> None:
    pieces = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    file = _file(tmp_path, decoder={"type": "Sequence", "decoders": pieces})
    assert byte_level_tokens(Tokenizer.from_file(str(file)), 2048) is None
    assert load_tokenizer(tmp_path, 2048, [1]).vocab_size == 2048
    assert byte_level_tokens(Tokenizer.from_file(str(DEMO / "tokenizer.json")), 2047) is None


def test_a_tokenizer_that_pads_or_cuts_texts_does_not_do_so_in_grammars(tmp_path: Path) -> None:
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    truncation = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    text = "the text that must be written"
    plain = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    _file(tmp_path, padding={**padding, "pad_token": "<|pad|>"}, truncation=truncation)
    matcher = compile_grammar(load_tokenizer(tmp_path, 2048, [1]), f'start: "{text}"').deep_copy()
    assert plain[:5] == matcher.compute_ff_tokens()[:5]


@pytest.mark.parametrize("special", [True, False])
def test_the_text_of_an_added_token_is_written_with_ordinary_tokens(tmp_path: Path, special: bool) -> None:
    """`<think>` of Qwen is an added token that tokenizer.json does not call special, and that llguidance does."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    parts = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    added = [
        {"id": 2048 + number, "content": content, "special": special, **flags}
        for number, content in enumerate(["<think>", "</think>", "<>"])
    ]
    file = _file(tmp_path, added_tokens=parts["added_tokens"] + added)
    text = "so <<think>><think>é</think><> on"
    matcher = compile_grammar(load_tokenizer(tmp_path, 2051, [1]), f'start: "{text}"').deep_copy()
    forced: list[int] = []
    while not matcher.is_stopped():
        forced += (found := matcher.compute_ff_tokens())
        assert found, forced
        assert matcher.consume_tokens(found), matcher.get_error()
    assert max(forced) < 2048
    assert Tokenizer.from_file(str(file)).decode(forced) == text


@pytest.mark.parametrize("raw", [None, make_fallback_tokenizer(["<s>", "</s>"])], ids=["bytes", "fallback"])
def test_tokens_that_another_file_calls_special_are_no_text(tmp_path: Path, raw: Tokenizer | None) -> None:
    """At a node, too: the model could write them within a string, and the router leaves them out of the text."""
    parts = json.loads((DEMO / "tokenizer.json").read_text("utf-8") if raw is None else raw.to_str())
    token_id = len(parts["model"]["vocab"])
    parts["model"]["vocab"]["[TOOL]"] = token_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"additional_special_tokens": ["[TOOL]"]}')
    size = token_id + 8
    for tokenizer in load_tokenizer(tmp_path, size, [1]), RouterTokenizer(tmp_path).for_grammars(size, [1]):
        for grammar, allowed in (("start: /(.|\\n)*/", False), (f"start: <[{token_id}]>", True)):
            assert compile_grammar(tokenizer, grammar).deep_copy().consume_token(token_id) is allowed
