"""`litellm`."""

from __future__ import annotations

import json

import litellm
from reporting import MODEL, QUESTION, V1, WEATHER_TOOL, check, run

COMMON = {"model": f"hosted_vllm/{MODEL}", "api_base": V1, "api_key": "none", "max_tokens": 200}
MESSAGES = [{"role": "user", "content": QUESTION}]


@check("completion")
def _() -> None:
    assert litellm.completion(messages=MESSAGES, temperature=0, **COMMON).choices[0].message.content


@check("completion, streamed")
def _() -> None:
    chunks = litellm.completion(messages=MESSAGES, stream=True, temperature=0, **COMMON)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("completion, asynchronous")
async def _() -> None:
    answer = await litellm.acompletion(messages=MESSAGES, temperature=0, **COMMON)
    assert answer.choices[0].message.content


@check("tools")
def _() -> None:
    answer = litellm.completion(messages=MESSAGES, tools=[WEATHER_TOOL], tool_choice="required", **COMMON)
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"]


@check("json_schema")
def _() -> None:
    schema = {"name": "city", "schema": WEATHER_TOOL["function"]["parameters"], "strict": True}
    answer = litellm.completion(
        messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema}, **COMMON
    )
    assert json.loads(answer.choices[0].message.content)["city"]


run()
