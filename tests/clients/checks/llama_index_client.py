"""`llama-index`, by its OpenAI-like model."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from reporting import MODEL, QUESTION, V1, check, run

model = OpenAILike(
    model=MODEL,
    api_base=V1,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0.0,
    max_tokens=200,
    context_window=2048,
)


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome", "Berlin"]
    rank: int = Field(ge=0, le=9)


@check("chat")
def _() -> None:
    assert model.chat([ChatMessage(role="user", content=QUESTION)]).message.content


@check("stream_complete")
def _() -> None:
    assert list(model.stream_complete(QUESTION))[-1].text


@check("as_structured_llm")
def _() -> None:
    answer = model.as_structured_llm(City).chat([ChatMessage(role="user", content=QUESTION)])
    assert isinstance(answer.raw, City)


@check("chat_with_tools, required")
def _() -> None:
    def get_weather(city: Literal["Paris", "Rome", "Berlin"]) -> str:
        """The weather in a city."""
        return "sunny"

    answer = model.chat_with_tools(
        [FunctionTool.from_defaults(get_weather)], user_msg="What is the weather in Paris?", tool_required=True
    )
    assert model.get_tool_calls_from_response(answer)[0].tool_name == "get_weather"


run()
