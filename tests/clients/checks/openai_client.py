"""The official `openai` client, sync and async."""

from __future__ import annotations

import json
from typing import Any, Literal

from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel, Field
from reporting import MODEL, QUESTION, V1, WEATHER_TOOL, check, run

client = OpenAI(base_url=V1, api_key="none")
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    name: Literal["Paris", "Rome", "Berlin"]
    rank: int = Field(ge=0, le=9)


@check("chat")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.completion_tokens


@check("chat, streamed, with usage")
def _() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage


@check("chat, asynchronous")
async def _() -> None:
    answer = await AsyncOpenAI(base_url=V1, api_key="none").chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8
    )
    assert answer.choices[0].message.content is not None


@check("completions: prompts, echo, logprobs, n, best_of")
def _() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One", "Two"], n=2, best_of=3, echo=True, logprobs=1, max_tokens=4
    )
    assert [choice.text[:3] for choice in answer.choices] == ["One", "One", "Two", "Two"]


@check("n > 1, streamed")
def _() -> None:
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, stream=True, max_tokens=8)
    assert {c.choices[0].index for c in stream if c.choices} == {0, 1, 2}


@check("`.parse` of a pydantic model")
def _() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


@check("response_format json_object")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=200, seed=1
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)


@check("tool_choice required")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[WEATHER_TOOL], tool_choice="required", max_tokens=200
    )
    call = (answer.choices[0].message.tool_calls or [])[0]
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome", "Berlin")


@check("tool_choice by name, streamed (`.stream`)")
def _() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        tools=[WEATHER_TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=200,
    ) as stream:
        final = stream.get_final_completion()
    call = (final.choices[0].message.tool_calls or [])[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)


@check("a history with tool calls and results")
def _() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history: Any = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER_TOOL], max_tokens=30)
    assert answer.choices[0].finish_reason


@check("a tool call unasked (tool_choice auto)")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER_TOOL],
        temperature=0,
    )
    assert (answer.choices[0].message.tool_calls or [])[0].function.name == "get_weather"


@check("responses")
def _() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20, temperature=0)
    assert answer.output_text


@check("responses, streamed")
def _() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=20) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds


@check("responses: `.parse`, `previous_response_id`")
def _() -> None:
    first = client.responses.parse(model=MODEL, input=QUESTION, text_format=City)
    assert isinstance(first.output_parsed, City)
    again = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, max_output_tokens=20
    )
    assert again.previous_response_id == first.id


@check("models, and an error by its class")
def _() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    refused = None
    try:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    except BadRequestError as error:
        refused = error
    assert refused is not None
    assert refused.param == "temperature"


run()
