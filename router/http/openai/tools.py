"""The functions that a chat request offers to the model. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from router.http.body_model import BodyModel
from router.http.openai.checks import bounded_json

MAX_TOOLS = 1024
"""Bounds the work of one request. OpenAI's own limit of 128 is one of its models; hubs of tool servers offer more."""
_MAX_DESCRIPTION = 65_536


class Function(BodyModel):
    """`parameters`: the JSON schema of its arguments. `strict`: the arguments must follow it."""

    name: Annotated[str, Field(pattern=r"^[-.A-Za-z0-9_]{1,256}$")]
    description: Annotated[str, Field(max_length=_MAX_DESCRIPTION)] | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(bounded_json)] | None = None
    strict: bool | None = None


class Tool(BodyModel):
    """One tool; only functions are supported."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as Hugging Face passes it to a template."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class FunctionName(BodyModel):
    """A function that the model must call."""

    name: str


class NamedToolChoice(BodyModel):
    """Makes the model call one function."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(BodyModel):
    """`tools`: the only functions that the model may call; `mode`: whether it must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(BodyModel):
    """Offers all functions, so that the prompt stays the same, and lets the model call some of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions
