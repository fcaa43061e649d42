"""Choices, regular expressions and grammars of clients."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from common.base.errors import BadRequest
from common.engine.grammar.compile import MAX_SOURCE_CHARS, compile_grammar
from common.model.config import load_model_config
from common.model.hub import resolve_model
from router.structured.sources import (
    MAX_CHOICES,
    MAX_GBNF_CHARS,
    MAX_GBNF_RULES,
    choice_grammar,
    regex_grammar,
    schema_grammar,
    text_grammar,
)
from router.text.tokenizer import Tokenizer
from router.text.typed_tokens import SEPARATOR

DEMO = resolve_model("demo")
CONFIG = load_model_config(DEMO)
TOKENIZER: LLTokenizer = Tokenizer(DEMO).for_grammars(CONFIG.vocab_size, CONFIG.eos_token_ids)


def accepts(source: str, text: str) -> bool:
    matcher = compile_grammar(TOKENIZER, source).deep_copy()
    ids = TOKENIZER.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


_CHARACTERS = st.text(st.characters(codec="utf-8", exclude_characters=SEPARATOR), max_size=8)
_CHOICES = st.one_of(
    _CHARACTERS, st.sampled_from(["<|bos|>", "<|eos|>", "a<|bos|>b"]), _CHARACTERS.map("<|{}|>".format)
)


@given(st.lists(_CHOICES, min_size=1, max_size=4, unique=True))
def test_every_choice_is_accepted_whatever_its_characters(choices: list[str]) -> None:
    source = choice_grammar(choices)
    for choice in choices:
        assert accepts(source, choice)
    assert not accepts(source, "".join(choices) + "?!?!?!?!?")


def test_the_text_of_a_special_token_is_written_with_ordinary_tokens() -> None:
    matcher = compile_grammar(TOKENIZER, choice_grammar(["a<|bos|>b"]))
    forced = matcher.compute_ff_tokens()
    assert matcher.consume_tokens(forced)
    assert not any(TOKENIZER.is_special_token(token_id) for token_id in forced)
    assert b"a<|bos|>b".startswith(TOKENIZER.decode_bytes(forced))
    named = compile_grammar(TOKENIZER, 'start: "a" <|bos|> "b"')
    assert TOKENIZER.is_special_token(named.compute_ff_tokens()[1])


@pytest.mark.parametrize("choice", ['a"b', "x\ny", "a/b\\c", "é😀", "\u2028", "\x00", "$ref", "%json", "/a/"])
def test_special_characters_of_choices_are_literal(choice: str) -> None:
    assert accepts(choice_grammar([choice, "other"]), choice)


@pytest.mark.parametrize(
    ("regex", "text"),
    [("a/b", "a/b"), (r"\d{3}-\d{4}", "555-1234"), ("(?i)yes|no", "NO"), ('a"b', 'a"b'), ("^x$", "x"), ("é+", "éé")],
)
def test_a_regular_expression_matches_the_whole_answer(regex: str, text: str) -> None:
    assert accepts(regex_grammar(regex), text)
    assert not accepts(regex_grammar(regex), text + "\n")


def test_grammars_are_lark_or_gbnf() -> None:
    assert accepts(text_grammar('start: "a" B\nB: /[0-9]+/'), "a12")
    assert accepts(text_grammar('root ::= "a" b\nb ::= [0-9]+'), "a12")


@pytest.mark.parametrize(
    ("rule", "accepted", "refused"),
    [
        (r"[\u00C0-\u00FF]+", "éàü", "e"),
        (r"[\u0400-\u04FF]+", "Привет", "a"),
        (r'"\u00e9ba" "\U0001F600"', "éba😀", "\u0e9ba😀"),
        (r'"\u0041\u000a"', "A\n", "A"),
        (r'"\\u00e9"', r"\u00e9", "é"),
        (r"[^\u0000-\u001F\u0022]", "a", '"'),
        (r"[\u0080-\u00FF]+", "é\x80", "\x7f"),
        (r"[^\u0000-\u001F\u007F-\u009F]", "é", "\x9f"),
        (r'"\u0085" "\U0000009f" "\\\u0080"', "\x85\x9f\\\x80", "85"),
    ],
)
def test_gbnf_may_name_characters_by_number(rule: str, accepted: str, refused: str) -> None:
    source = text_grammar(f"root ::= {rule}")
    assert accepts(source, accepted)
    assert not accepts(source, refused)


def test_many_line_breaks_take_no_time() -> None:
    began_s = time.process_time()
    with pytest.raises(BadRequest, match="Expected name"):
        text_grammar("a ::= b" + "\n" * 15_000 + "::=")
    assert time.process_time() - began_s < 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: choice_grammar([]), "at least one choice"),
        (lambda: choice_grammar(["a"] * (MAX_CHOICES + 1)), "at most 1024 choices"),
        (lambda: regex_grammar("a" * (MAX_SOURCE_CHARS + 1)), "characters, more than"),
        (lambda: text_grammar("root ::= ("), "line 1"),
        (lambda: text_grammar("root ::= greeting"), "Rule 'greeting' not found"),
        (lambda: text_grammar(""), "No 'root' rule"),
        (lambda: text_grammar("# c"), "No 'root' rule"),
        (lambda: text_grammar("a ::= b\nb ::= a"), "No 'root' rule"),
        (lambda: text_grammar('é ::= "a"'), "No 'root' rule"),
        (lambda: text_grammar('root ::= "a"\na-b ::= "b"\na_b ::= "c"'), "Rule 'A_B' already exists"),
        (lambda: text_grammar('root ::= start\nstart ::= "a"'), "Rule 'start' already exists"),
        (lambda: text_grammar('root ::= "\\'), "ends within an escape sequence"),
        (lambda: text_grammar("root ::= [\\"), "ends within an escape sequence"),
        (lambda: text_grammar("#" * (MAX_GBNF_CHARS + 1)), "GBNF may have at most 65536 characters"),
        (lambda: text_grammar("a ::= b\n" * (MAX_GBNF_RULES + 1)), "and 512 rules"),
        (lambda: text_grammar('{"grammars": []}'), "must be Lark or GBNF"),
        (lambda: schema_grammar("{", None), "not valid JSON"),
        (lambda: schema_grammar("[1]", None), "must be a JSON object"),
        (lambda: schema_grammar('{"x": %s}' % ("[" * 150 + "]" * 150), None), "cannot be read: recursion limit"),
        (lambda: schema_grammar('{"maximum": 1e999}', None), "cannot be read: expected value"),
        (lambda: compile_grammar(TOKENIZER, regex_grammar("a(b")), "unclosed group"),
        (lambda: compile_grammar(TOKENIZER, regex_grammar("(?=a)b")), "look-around"),
    ],
)
def test_what_cannot_be_read_says_where(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(BadRequest, match=message):
        make()
