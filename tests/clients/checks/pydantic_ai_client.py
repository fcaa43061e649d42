"""`pydantic-ai`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from reporting import MODEL, QUESTION, V1, check, run

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key="none"))
SETTINGS = {"temperature": 0.0, "max_tokens": 200}


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome", "Berlin"]
    rank: int = Field(ge=0, le=9)


@check("run_sync")
def _() -> None:
    assert Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output


@check("output_type (tool)")
def _() -> None:
    assert isinstance(Agent(model, output_type=City, model_settings=SETTINGS).run_sync(QUESTION).output, City)


@check("output_type (NativeOutput)")
def _() -> None:
    agent = Agent(model, output_type=NativeOutput(City), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, City)


@check("run_stream")
async def _() -> None:
    async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as answer:
        assert await answer.get_output()


@check("a tool, called by the model")
def _() -> None:
    agent, called = Agent(model, model_settings=SETTINGS), []

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome", "Berlin"]) -> str:
        """The weather in a city."""
        called.append(city)
        return "sunny"

    agent.run_sync("What is the weather in Paris?")
    assert called


run()
