"""Sessions: each turn carries all before it, agents get the results of their calls."""

from __future__ import annotations

import statistics
from dataclasses import replace

from kvrelay.load.jobs import synthetic_job
from kvrelay.load.plan import LoadPlan
from kvrelay.load.sessions import Conversation, ReceivedAnswer, read_answer

PLAN = LoadPlan("http://x", "m", prefixes=2, prefix_tokens=10, suffix_tokens=5, output_tokens=4, turns=3)


def test_every_turn_carries_the_messages_before_it() -> None:
    talk = Conversation(PLAN, synthetic_job(PLAN, 3))
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
    talk = Conversation(replace(PLAN, tools=True), synthetic_job(PLAN, 3))
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
    plan = replace(PLAN, turns=5, think_s=2.0)
    pauses = [pause for number in range(300) for pause in synthetic_job(plan, number).pauses_s]
    assert len(pauses) == 4 * 300
    assert 1.8 < statistics.mean(pauses) < 2.2
    assert synthetic_job(plan, 7) == synthetic_job(plan, 7)


def test_nobody_says_nothing() -> None:
    """Some servers refuse a message without content."""
    plan = replace(PLAN, suffix_tokens=0)
    talk = Conversation(plan, synthetic_job(plan, 3))
    talk.take(ReceivedAnswer("one"))
    assert [message["content"] for message in talk.messages[1:]] == ["Go on.", "one", "Go on."]


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
