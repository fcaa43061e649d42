"""Requests with grammars at the two nodes: waiting for compilation, joining, failing, replaying."""

from __future__ import annotations

import pytest
from support.grammars import EOS, constrained, json_grammar
from support.node_pair import KEY, PROMPT, ROUTER, Pair

from common.control.identities import pack_ids
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    Grammar,
    PrefillDone,
    SamplingParams,
)
from common.engine.grammar.compile import COMPILE_TIMEOUT_S
from common.node.events import ClientLost, FromClient

GRAMMAR = json_grammar()
LIMIT = 60


def expected(grammar: Grammar = GRAMMAR) -> list[int]:
    return constrained(PROMPT, SamplingParams(0, LIMIT, temperature=0.0, stop_token_ids=[EOS], grammar=grammar))


def ask(pair: Pair, grammar: Grammar = GRAMMAR, key: AttemptKey = KEY) -> None:
    pair.request(key=key, max_tokens=LIMIT, stop_token_ids=[EOS], grammar=grammar)


def failures(pair: Pair) -> list[str]:
    heard = pair.heard(pair.p_out) + pair.heard(pair.d_out)
    return [message.code for message in heard if isinstance(message, AttemptFailed)]


def test_the_prefill_nodes_first_token_and_the_decode_nodes_others_follow_the_grammar() -> None:
    pair = Pair()
    ask(pair)
    pair.run()
    assert pair.tokens() == expected()
    assert failures(pair) == []
    pair.assert_whole()


def test_an_answer_of_one_token_ends_at_the_prefill_node() -> None:
    pair = Pair()
    ask(pair, Grammar('start: "{" | "}"'))
    pair.run()
    assert pair.tokens() in ([ord("{")], [ord("}")])
    assert pair.d_runner.steps == 0
    pair.assert_whole()


@pytest.mark.parametrize("length", [1, 5, 12])
def test_a_later_attempt_continues_in_the_grammar(length: int) -> None:
    pair, answer = Pair(), expected()
    params = SamplingParams(0, LIMIT, temperature=0.0, stop_token_ids=[EOS], grammar=GRAMMAR)
    request = DecodeRequest(KEY, EngineRequest(pack_ids(PROMPT), params), pack_ids(answer[:length]), None, 600.0)
    pair.d.handle(FromClient(ROUTER, request))
    pair.run()
    assert pair.tokens() == answer[length:]
    pair.assert_whole()


def test_a_request_waits_for_its_grammar_and_others_go_on() -> None:
    pair = Pair()
    pair.p_grammars.at_once = pair.d_grammars.at_once = False
    ask(pair)
    other = AttemptKey("other", 1)
    pair.request(key=other, max_tokens=3)
    pair.run(20)
    assert len(pair.tokens(other)) == 3
    assert pair.tokens() == []
    pair.p_grammars.compile_all()
    pair.run(20)
    assert pair.tokens() == expected()[:1]
    assert pair.d.describe_attempts()[0]["state"] == "KV complete, first token not yet in"
    pair.d_grammars.compile_all()
    pair.run()
    assert pair.tokens() == expected()
    pair.assert_whole()


@pytest.mark.parametrize("end", [Abort(KEY), ClientLost(ROUTER), None])
@pytest.mark.parametrize("relayed", [False, True])
def test_an_attempt_may_end_while_its_grammar_is_compiled(end: object, relayed: bool) -> None:
    pair = Pair()
    pair.p_grammars.at_once, pair.d_grammars.at_once = relayed, False
    ask(pair)
    pair.run(20)
    if end is None:  # its deadline passes
        pair.clock.advance(601.0)
        pair.p.on_time(pair.clock())
        pair.d.on_time(pair.clock())
    else:
        for node in (pair.p, pair.d):
            node.handle(FromClient(ROUTER, end) if isinstance(end, Abort) else end)
    pair.run(5)
    pair.p_grammars.compile_all()
    pair.d_grammars.compile_all()
    pair.run()
    assert pair.tokens() == expected()[: 1 if relayed else 0]
    pair.assert_whole()


def test_a_compilation_that_takes_too_long_fails_as_overload() -> None:
    pair = Pair()
    pair.p_grammars.at_once = False
    ask(pair)
    pair.clock.advance(COMPILE_TIMEOUT_S + 1)
    pair.p.on_time(pair.clock())
    pair.run()
    assert failures(pair)[0] == "overloaded"
    pair.p_grammars.compile_all()
    pair.run()
    pair.assert_whole()


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone() -> None:
    pair = Pair()
    pair.p_grammars.at_once = pair.d_grammars.at_once = False
    ask(pair, Grammar("start: nothing_of_this_name"))
    other = AttemptKey("other", 1)
    pair.request(key=other, max_tokens=3)
    pair.p_grammars.compile_all()
    pair.run()
    pair.d_grammars.compile_all()
    pair.run()
    assert set(failures(pair)) == {"invalid_request"}
    assert len(pair.tokens(other)) == 3
    pair.assert_whole()


def test_a_first_token_that_the_grammar_does_not_allow_fails_the_attempt() -> None:
    pair = Pair()
    ask(pair)
    for _ in range(20):
        pair.step_prefill()
        for out in pair.to_decode():
            if isinstance(out, PrefillDone):
                pair.d.attempts[KEY].first_token = ord("#")
        pair.to_prefill()
        while pair.wire.pump():
            pass
    pair.run()
    assert failures(pair) == ["invalid_request"]
    pair.assert_whole()
