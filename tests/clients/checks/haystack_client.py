"""`haystack-ai`."""

from __future__ import annotations

from typing import Any, Literal

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel, Field
from reporting import MODEL, QUESTION, V1, WEATHER_TOOL, check, run

MESSAGES = [ChatMessage.from_user(QUESTION)]
FUNCTION: Any = WEATHER_TOOL["function"]
TOOL = Tool(FUNCTION["name"], FUNCTION["description"], FUNCTION["parameters"], function=lambda city: "sunny")


class City(BaseModel):
    name: Literal["Paris", "Rome", "Berlin"]
    rank: int = Field(ge=0, le=9)


def generator(**more: Any) -> OpenAIChatGenerator:
    options = {"temperature": 0, "max_tokens": 200, **more.pop("generation_kwargs", {})}
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model=MODEL, api_base_url=V1, generation_kwargs=options, **more
    )


@check("run")
def _() -> None:
    assert generator().run(MESSAGES)["replies"][0].text


@check("streaming_callback")
def _() -> None:
    pieces: list[str] = []
    generator(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(MESSAGES)
    assert "".join(pieces)


@check("response_format")
def _() -> None:
    reply = generator(generation_kwargs={"response_format": City}).run(MESSAGES)["replies"][0]
    assert City.model_validate_json(reply.text)


@check("tools, required")
def _() -> None:
    reply = generator(tools=[TOOL], generation_kwargs={"tool_choice": "required"}).run(MESSAGES)["replies"][0]
    assert reply.tool_calls[0].tool_name == "get_weather"


run()
