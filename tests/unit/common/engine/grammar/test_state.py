"""The masks of a sequence under a grammar are a function of its generated tokens."""

import json

import pytest
from support.grammars import EOS, allowed_by, fake_tokenizer, json_grammar, text_of

from common.base.errors import BadRequest
from common.control.messages import Grammar, SamplingParams
from common.engine.grammar.compile import compile_grammar
from common.engine.grammar.state import GrammarState

PROMPT = [5, 6, 7]


def state_of(grammar: Grammar, stop: tuple[int, ...] = (EOS,), min_tokens: int = 0) -> GrammarState:
    params = SamplingParams(0, 100, stop_token_ids=list(stop), min_tokens=min_tokens, grammar=grammar)
    return GrammarState(compile_grammar(fake_tokenizer(), grammar.source), params, len(PROMPT), [EOS])


def masks_of(state: GrammarState, token_ids: list[int]) -> set[int]:
    state.take(PROMPT + token_ids)
    state.prepare()
    return allowed_by(state.mask())


def walk(grammar: Grammar) -> tuple[list[int], list[set[int]]]:
    """An answer that always takes the highest token, and what was allowed at each of its positions."""
    state, answer, masks = state_of(grammar), [], []
    while not state.complete:
        masks.append(masks_of(state, answer))
        answer.append(max(masks[-1]))
        state.take(PROMPT + answer)
    return answer, masks


def test_what_is_allowed_depends_on_the_generated_tokens_alone_however_they_came() -> None:
    grammar = json_grammar()
    answer, masks = walk(grammar)
    assert set(json.loads(text_of(answer))) == {"name", "kind", "count"}
    for length, expected in enumerate(masks):
        assert masks_of(state_of(grammar), answer[:length]) == expected, "all at once, as a later attempt does"


def test_forced_tokens_are_the_only_ones_allowed_at_their_positions() -> None:
    state = state_of(json_grammar())
    masks_of(state, [])
    forced = list(state.forced)
    assert text_of(forced) == '{"name":'
    for position, token_id in enumerate(forced):
        assert allowed_by(state.mask(position)) == {token_id}
    after = allowed_by(state.mask(len(forced)))
    assert masks_of(state, forced) == after
    assert len(after) > 1


@pytest.mark.parametrize("length", [0, 4])
def test_a_token_that_the_grammar_does_not_allow_is_refused(length: int) -> None:
    answer = [*b'{"na'][:length]
    with pytest.raises(BadRequest, match=f"as number {length + 1} of the answer"):
        state_of(json_grammar()).take([*PROMPT, *answer, ord("#")])


def test_the_grammar_begins_after_the_first_occurrence_of_its_marker() -> None:
    state = state_of(json_grammar(after=(40, 41)))
    for token_ids in ([], [41, 40], [41, 40, 40]):
        state.take(PROMPT + token_ids)
        state.prepare()
        assert state.mask() is None
        assert state.banned == [EOS], "an answer that ended here would not be valid"
        assert not state.begun
    assert masks_of(state, [41, 40, 40, 41]) == masks_of(state_of(json_grammar()), [])
    assert not state.banned


def test_the_marker_does_not_count_in_the_prompt() -> None:
    state = state_of(json_grammar(after=(7, 40)))
    state.take([*PROMPT, 40])
    assert not state.begun


def test_stop_tokens_are_allowed_where_the_grammar_may_end() -> None:
    digits = Grammar("start: /[0-9]+/")
    state = state_of(digits, stop=(EOS, ord("x")))
    assert not masks_of(state, []) & {EOS, ord("x")}
    assert masks_of(state, [ord("1")]) >= {EOS, ord("x"), ord("2")}
    assert not state.complete


def test_before_min_tokens_and_with_ignore_eos_the_answer_goes_on_where_it_can() -> None:
    digits = Grammar("start: /[0-9]+/")
    assert EOS not in masks_of(state_of(digits, min_tokens=3), [ord("1"), ord("1")])
    assert EOS in masks_of(state_of(digits, min_tokens=2), [ord("1"), ord("1")])
    assert EOS not in masks_of(state_of(digits, stop=()), [ord("1")])


def test_a_stop_token_that_is_text_of_the_grammar_waits_for_min_tokens_unless_nothing_else_is_allowed() -> None:
    stop, letters = (EOS, ord("x")), Grammar("start: /[xyz]+/")
    assert masks_of(state_of(letters, stop, min_tokens=2), [ord("y")]) == set(b"yz")
    assert masks_of(state_of(letters, stop, min_tokens=2), [*b"yy"]) == {EOS, *b"xyz"}
    assert masks_of(state_of(Grammar("start: /x+/"), stop, min_tokens=2), []) == {ord("x")}


def test_a_grammar_that_is_complete_ends_the_answer_before_min_tokens_and_with_ignore_eos() -> None:
    for stop in ((), (EOS,)):
        state = state_of(Grammar('start: "ab"'), stop=stop, min_tokens=50)
        state.take([*PROMPT, *b"ab"])
        assert state.complete
    empty = state_of(Grammar('start: ""'), stop=(), min_tokens=50)
    assert masks_of(empty, []) == {EOS}
    empty.take([*PROMPT, EOS])
    assert empty.complete
