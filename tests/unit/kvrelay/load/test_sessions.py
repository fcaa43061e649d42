"""Sessions: each turn carries all before it, agents get the results of their calls."""

from __future__ import annotations

import statistics

from kvrelay.load.jobs import SyntheticPrompts
from kvrelay.load.sessions import Conversation, ReceivedAnswer, read_answer, session

WORDS = SyntheticPrompts(2, 10, 5, 4, 1000, text=True)


def test_every_turn_carries_the_messages_before_it() -> None:
    talk = Conversation(session(WORDS, 3, 3, 0.0, tools=False, at_s=None), seed=0)
    first = list(talk.fields()["messages"])
    assert [message["role"] for message in first] == ["system", "user"]
    talk.take(ReceivedAnswer("one"))
    second = list(talk.fields()["messages"])
    assert second[:2] == first
    assert [message["role"] for message in second[2:]] == ["assistant", "user"]
    assert second[2]["content"] == "one"
    assert len(second[3]["content"].split()) == 5
    assert second[3]["content"] != first[1]["content"]
    assert "tools" not in talk.fields()


def test_an_agent_must_call_a_tool_until_its_last_turn() -> None:
    talk = Conversation(session(WORDS, 3, 3, 0.0, tools=True, at_s=None), seed=0)
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"query": "x"}'}}
    choices = []
    for _ in range(3):
        fields = talk.fields()
        choices.append(fields["tool_choice"])
        assert fields["tools"][0]["function"]["name"] == "look_up"
        talk.take(ReceivedAnswer("", [call]))
    assert choices == ["required", "required", "none"]
    assert [message["role"] for message in talk.messages[2:4]] == ["assistant", "tool"]
    assert talk.messages[3]["tool_call_id"] == "c1"


def test_pauses_have_the_wanted_mean_and_depend_on_the_number_only() -> None:
    pauses = [pause for n in range(300) for pause in session(WORDS, n, 5, 2.0, tools=False, at_s=None).pauses_s]
    assert 1.8 < statistics.mean(pauses) < 2.2
    assert session(WORDS, 7, 5, 2.0, tools=False, at_s=None) == session(WORDS, 7, 5, 2.0, tools=False, at_s=None)


def chunk(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta}]}


def test_an_answer_is_put_together_from_its_events() -> None:
    def part(index: int, arguments: str, **more: object) -> dict[str, object]:
        return {"index": index, "function": {"arguments": arguments}, **more}

    answer = read_answer(
        [
            chunk(role="assistant", content="Let "),
            chunk(content="me see."),
            chunk(tool_calls=[{"index": 0, "id": "a", "function": {"name": "look_up", "arguments": '{"que'}}]),
            chunk(tool_calls=[part(0, 'ry": "x"}')]),
            chunk(tool_calls=[part(1, '{"query": "cut o', id="b")]),
            {"choices": [], "usage": {}},
        ]
    )
    assert answer.text == "Let me see."
    assert [call["id"] for call in answer.calls] == ["a", "b"]
    assert [call["function"]["arguments"] for call in answer.calls] == ['{"query": "x"}', "{}"]
