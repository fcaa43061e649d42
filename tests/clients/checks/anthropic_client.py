"""The official `anthropic` client."""

from __future__ import annotations

from anthropic import Anthropic
from reporting import MODEL, QUESTION, URL, check, run

client = Anthropic(base_url=URL, api_key="none")
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Berlin"]}},
        "required": ["city"],
    },
}


@check("messages")
def _() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=30, messages=MESSAGES)
    assert answer.content[0].text
    assert answer.usage.output_tokens


@check("messages, streamed")
def _() -> None:
    with client.messages.stream(model=MODEL, max_tokens=30, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        assert text
        assert stream.get_final_message().stop_reason


@check("tool_choice any, streamed")
def _() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any"}
    ) as stream:
        final = stream.get_final_message()
    uses = [block for block in final.content if block.type == "tool_use"]
    assert uses[0].input["city"] in ("Paris", "Rome", "Berlin")
    assert final.stop_reason == "tool_use"


@check("a history with tool results")
def _() -> None:
    history = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]},
    ]
    assert client.messages.create(model=MODEL, max_tokens=30, messages=history, tools=[TOOL]).stop_reason


@check("count_tokens")
def _() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens


run()
