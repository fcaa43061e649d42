"""`instructor`, in three modes."""

from __future__ import annotations

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field
from reporting import MODEL, QUESTION, V1, check, run


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome", "Berlin"]
    rank: int = Field(ge=0, le=9)


class Anything(BaseModel):
    """Any object: mode JSON holds the model to JSON, not to a schema."""

    model_config = ConfigDict(extra="allow")


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):

    @check(mode.name)
    def _(mode: instructor.Mode = mode) -> None:
        wanted = Anything if mode is instructor.Mode.JSON else City
        client = instructor.from_openai(OpenAI(base_url=V1, api_key="none"), mode=mode)
        answer = client.chat.completions.create(
            model=MODEL,
            response_model=wanted,
            messages=[{"role": "user", "content": QUESTION}],
            max_retries=3,
            max_tokens=200,
            temperature=0,
        )
        assert isinstance(answer, wanted)


run()
