"""The answer's grammar begins behind the reasoning, if there is any."""

from __future__ import annotations

import pytest
from llguidance import LLTokenizer
from support.grammars import EOS, fake_tokenizer

from common.control.messages import SamplingParams
from common.engine.grammar.compile import compile_grammar
from common.engine.grammar.state import GrammarState
from router.http.openai.chat_grammar import behind_reasoning
from router.output.reasoning import ReasoningTags
from router.structured.json_schema import json_schema_grammar

TAGS = ReasoningTags("<think>", "</think>")
SOURCES = [json_schema_grammar({"type": "integer"}), "start: /[0-9]+/"]
CLOSE = 900
"""Stands for a closing tag that is one token."""
TOKENIZER: LLTokenizer = fake_tokenizer()


def accepts(source: str, prompt: str, answer: list[int], *, one_token: bool = False) -> bool:
    ids = {TAGS.close: CLOSE} if one_token else {}
    grammar = behind_reasoning(source, TAGS, prompt, ids.get)
    params = SamplingParams(0, 100, stop_token_ids=[EOS], grammar=grammar)
    state = GrammarState(compile_grammar(TOKENIZER, grammar.source).deep_copy(), params, 0, [EOS])
    try:
        state.take(answer)
    except Exception:
        return False
    state.prepare()
    mask = state.mask()
    return mask is not None and bool(mask[EOS // 8] >> EOS % 8 & 1)


@pytest.mark.parametrize("source", SOURCES)
def test_reasoning_that_the_prompt_opened_comes_first(source: str) -> None:
    for answer in (b"any {text}</think>12", b"</think>\n\n12"):
        assert accepts(source, "x<think>\n", [*answer])
    for answer in (b"12", b"</think>x", b"any"):
        assert not accepts(source, "x<think>\n", [*answer])


@pytest.mark.parametrize("source", SOURCES)
def test_reasoning_that_ends_with_one_token_is_not_part_of_the_grammar(source: str) -> None:
    assert accepts(source, "x<think>\n", [*b"any {text}", CLOSE, *b"\n12"], one_token=True)
    assert not accepts(source, "x<think>\n", [*b"any {text}", CLOSE, *b"\nx"], one_token=True)


@pytest.mark.parametrize("source", SOURCES)
def test_a_model_may_open_its_reasoning_or_answer_at_once(source: str) -> None:
    assert accepts(source, "x", [*b"12"])
    assert accepts(source, "x", [*b"<think>why</think>\n12"])
    assert not accepts(source, "x", [*b"<think>why</think>\nx"])
    assert not accepts(source, "x", [*b"why"])


@pytest.mark.parametrize("source", SOURCES)
def test_a_prompt_that_closed_the_reasoning_leaves_the_answer(source: str) -> None:
    assert accepts(source, "x<think>\n\n</think>\n\n", [*b"12"])
    assert not accepts(source, "x<think>\n\n</think>\n\n", [*b"<think>why</think>12"])


@pytest.mark.parametrize("source", SOURCES)
def test_a_prompt_that_ends_within_an_answer_leaves_the_rest_of_it(source: str) -> None:
    within = TAGS.prompt_before("x<think>hm", "<think>hm")
    assert accepts(source, within, [*b" so</think>12"])
    assert not accepts(source, within, [*b"12"])
    behind = TAGS._replace(always=True).prompt_before("xNumber: ", "Number: ")
    assert accepts(source, behind, [*b"12"])
    assert not accepts(source, behind, [*b"why</think>12"])
