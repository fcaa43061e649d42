"""`langchain-openai`."""

from __future__ import annotations

from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from reporting import MODEL, QUESTION, V1, check, run

model = ChatOpenAI(base_url=V1, api_key="none", model=MODEL, temperature=0, max_tokens=200)


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome", "Berlin"]
    rank: int = Field(ge=0, le=9)


@tool
def get_weather(city: Literal["Paris", "Rome", "Berlin"]) -> str:
    """The weather in a city."""
    return "sunny"


@check("invoke")
def _() -> None:
    assert model.invoke(QUESTION).content


@check("stream")
def _() -> None:
    assert "".join(str(chunk.content) for chunk in model.stream(QUESTION))


for method in ("function_calling", "json_schema", "json_mode"):

    @check(f"with_structured_output, {method}")
    def _(method: str = method) -> None:
        question = QUESTION + (' Answer as JSON: {"name": "Paris", "rank": 1}' if method == "json_mode" else "")
        structured = model.with_structured_output(City, method=method, include_raw=method == "json_mode")
        answer = structured.invoke(question)
        # In JSON mode nothing holds the model to the schema: the answer must be JSON.
        assert answer["raw"].content.startswith("{") if method == "json_mode" else isinstance(answer, City)


@check("bind_tools, required")
def _() -> None:
    answer = model.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Paris?")
    assert isinstance(answer, AIMessage)
    assert answer.tool_calls[0]["name"] == "get_weather"


@check("tool history")
def _() -> None:
    call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1", "type": "tool_call"}
    history = [
        HumanMessage("What is the weather in Paris?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("sunny", tool_call_id="call_1"),
    ]
    assert model.bind_tools([get_weather]).invoke(history)


run()
