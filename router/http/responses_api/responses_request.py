"""Body of `POST /v1/responses`, and the chat request that means the same. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, field_validator, model_validator

from router.http.body_model import BodyModel
from router.http.json_body import Json
from router.http.openai.chat_request import MAX_MESSAGES
from router.http.openai.checks import MAX_INT, FieldsError, as_object, items, shorten, type_of
from router.http.openai.shared_fields import MAX_LOGPROBS
from router.http.openai.unknown_fields import UNSUPPORTED
from router.http.responses_api.input_items import InputItem, InputMessage, chat_messages, left_out_items, readable_items

_MAX_METADATA = 16
_ShortText = Annotated[str, Field(max_length=512)]
"""A value of `metadata`."""
_OF_CHAT = frozenset(
    {
        *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "bad_words"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "structured_outputs"),
        *("priority", "cache_salt", "skip_special_tokens", "chat_template_kwargs", "truncate_prompt_tokens"),
        *("truncation_side", "include_stop_str_in_output", "logprob_token_ids"),
    }
)
"""Fields of the chat call that this one takes too, although OpenAI's does not."""

_ABSENT = frozenset(
    {
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
        "file_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    }
)
"""Parts that no answer has, because reasoning is not encrypted and only functions are called. Clients may ask to include them."""


_LOGPROBS = "message.output_text.logprobs"


def _functions_of(value: Any) -> Any:
    """A list of tools without those that are left out: other kinds beside functions."""
    tools = items(value) or []
    is_beside = "function" in map(type_of, tools)
    return [tool for tool in tools if type_of(tool) in ("function", None)] if is_beside else value


class FunctionTool(BodyModel):
    """A function that the model may call; other tools are left out beside functions, and refused alone."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(BodyModel):
    """Makes the model call one function."""

    type: Literal["function"]
    name: str


class AllowedTools(BodyModel):
    """Offers all functions, and lets the model call some of them. Other tools are left out beside functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], BeforeValidator(_functions_of)]


class PlainText(BodyModel):
    """Any text."""

    type: Literal["text"]


class JsonObject(BodyModel):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(BodyModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str = "answer"
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextConfig(BodyModel):
    """How the answer's text looks."""

    format: Annotated[PlainText | JsonObject | JsonSchema, Discriminator("type")] | None = None


class Reasoning(BodyModel):
    """How the model reasons."""

    effort: str | None = None


class ResponsesRequest(BodyModel):
    """Body of `POST /v1/responses`. It also takes the sampling fields of a chat request."""

    model_config = ConfigDict(extra="allow")

    PASSED_ON = _OF_CHAT | UNSUPPORTED.keys()
    WITHOUT_EFFECT = frozenset(
        {"background_options", "context_management", "max_tool_calls", "prompt_cache_options", "stream_options"}
    )
    KNOWN_WITHIN = {"text": frozenset(TextConfig.model_fields)}  # without OpenAI's `text.verbosity`
    OWN_NAMES = {
        "messages": "input",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "tools.*.function": "tools.*",
        "tool_choice.function": "tool_choice",
        "tool_choice.allowed_tools": "tool_choice",
        "reasoning_effort": "reasoning.effort",
    }

    model: Annotated[str, Field(max_length=1024)] | None = None
    input: Annotated[
        str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)], BeforeValidator(readable_items)
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    store: bool | None = True
    stream: bool | None = False
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], BeforeValidator(_functions_of)] | None = None
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[FunctionChoice | AllowedTools, Discriminator("type")] | None
    ) = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[_ShortText, _ShortText] | None = None
    user: str | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    include: list[str] | None = None
    conversation: None = None
    use_beam_search: Literal[False] | None = None
    prompt: None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Most likely tokens beside each token of the answer's text, which asks for log-probabilities as `include` does."""

    @staticmethod
    def left_out(body: Json) -> list[str]:
        """The ignored parts of a body: tools that are not functions, if there are functions, as `tools.KIND`, and items of other
        servers, as `input.KIND`."""
        found = [f"input.{kind}" for kind in left_out_items(body.get("input"))]
        kinds = dict.fromkeys(type_of(tool) for tool in items(body.get("tools")) or ())
        if "function" in kinds:
            found += [f"tools.{kind}" for kind in kinds if kind not in ("function", None)]
        return found

    @model_validator(mode="after")
    def _check_background(self) -> ResponsesRequest:
        if self.background and (self.stream or self.store is False):
            raise FieldsError("background", "background is only allowed with stream=false and store=true")
        return self

    @field_validator("include")
    @classmethod
    def _refuse_include(cls, value: list[str] | None) -> list[str] | None:
        for each in value or ():
            if each not in _ABSENT and each != _LOGPROBS:
                raise ValueError(f"{shorten(each)} is not supported")
        return value

    @field_validator("metadata", mode="before")
    @classmethod
    def _check_metadata(cls, value: Any) -> Any:
        if len(as_object(value) or {}) > _MAX_METADATA:
            raise ValueError(f"at most {_MAX_METADATA} entries are allowed")
        return value

    def chat_messages(self) -> list[Json]:
        """The messages of this turn, without the instructions."""
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return chat_messages(items)

    def chat_request(self, earlier: list[Json]) -> Json:
        """The body of the chat call that means the same; validating it checks what is not checked here.

        `earlier`: the messages of the turns before.
        """
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        body: Json = {name: value for name, value in (self.model_extra or {}).items() if name in self.PASSED_ON}
        for name in ("model", "stream", "temperature", "top_p", "user"):
            body[name] = getattr(self, name)
        body["max_completion_tokens"] = self.max_output_tokens
        body["messages"] = [*system, *earlier, *self.chat_messages()]
        body["tool_choice"] = self._tool_choice()
        if self.tools:
            body["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ]
            body["parallel_tool_calls"] = self.parallel_tool_calls
        if self.text is not None and self.text.format is not None:
            body["response_format"] = _response_format(self.text.format)
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.reasoning is not None and self.reasoning.effort is not None:
            body["reasoning_effort"] = self.reasoning.effort
        return body

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            tools = [_function_choice(each) for each in choice.tools]
            return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": tools}}
        return _function_choice(choice) if isinstance(choice, FunctionChoice) else choice

    def shown(self) -> Json:
        """The fields that a response repeats from its request."""
        text = {"type": "text"}
        if self.text is not None and self.text.format is not None:
            text = self.text.format.model_dump(by_alias=True)
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": {"format": text},
            "tool_choice": "auto" if self.tool_choice is None else _plain(self.tool_choice),
            "tools": [tool.model_dump() for tool in self.tools or []],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


def _function_choice(choice: FunctionChoice) -> Json:
    """The same choice in the form of the chat call."""
    return {"type": choice.type, "function": {"name": choice.name}}


def _plain(choice: str | FunctionChoice | AllowedTools) -> str | Json:
    return choice if isinstance(choice, str) else choice.model_dump()


def _response_format(wanted: PlainText | JsonObject | JsonSchema) -> Json:
    if isinstance(wanted, JsonSchema):
        schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": wanted.type}
