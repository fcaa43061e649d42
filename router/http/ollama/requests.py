"""Bodies of ollama's calls, and the chat or completion request that means the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from router.http.body_model import BodyModel
from router.http.json_body import Json
from router.http.openai.chat_request import MAX_MESSAGES
from router.http.openai.checks import MAX_INT, as_object, items, with_integers
from router.http.openai.past_parts import named

_NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Options that the chat call knows by another name."""


def _refuse_images(value: list[Any]) -> list[Any]:
    if value:
        raise ValueError("images are not supported")
    return value


_Images = Annotated[list[Any], AfterValidator(_refuse_images)]


class Options(BodyModel):
    """How tokens are drawn. `num_predict`: the most tokens; 0 or negative: no limit. The context's size is the server's.
    `top_p` and `min_p` are cut to 0 to 1."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT)] | None = None
    mirostat: Annotated[int, Field(ge=0, le=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_integers(cls, value: Any) -> Any:
        fields = as_object(value)
        return value if fields is None else with_integers(fields)

    def fields(self) -> Json:
        """The fields of a chat or completion request."""
        given = self.model_dump(exclude_none=True, exclude={"mirostat"})
        if given.get("num_predict", 1) < 1:
            del given["num_predict"]
        for name in given.keys() & {"top_p", "min_p"}:
            given[name] = min(max(given[name], 0), 1)
        return {_NAMES.get(name, name): value for name, value in given.items()}


class _Named(BodyModel):
    WITHOUT_EFFECT = frozenset({"keep_alive", "options", "shift", "truncate"})  # unless a call has a field of that name

    model: Annotated[str, Field(max_length=1024)] | None = None

    @field_validator("model")
    @classmethod
    def _without_tag(cls, value: str | None) -> str | None:
        return None if value is None else value.removesuffix(":latest")


class _Call(_Named):
    OWN_NAMES = {
        **{_NAMES.get(name, name): f"options.{name}" for name in Options.model_fields},
        "response_format": "format",
        "reasoning_effort": "think",
    }

    stream: bool | None = True
    options: Options | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    think: bool | Annotated[str, Field(min_length=1, max_length=32)] | None = None
    """Whether the model reasons, or how much, in a word that its chat template knows."""

    def shared(self) -> Json:
        """The fields that every call has."""
        body: Json = {"model": self.model, "stream": self.stream is not False}
        if self.options is not None:
            body |= self.options.fields()
        if isinstance(self.think, str):
            body["reasoning_effort"] = self.think
        elif self.think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.think}
        if isinstance(self.format, dict):
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}
        elif self.format:
            body["response_format"] = {"type": "json_object"}
        return body


class OllamaFunction(BodyModel):
    """A called function."""

    name: str
    arguments: dict[str, Any] | str = {}


class OllamaCall(BodyModel):
    """A tool call of an earlier answer."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(BodyModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: _Images | None = None


def chat_messages(messages: Sequence[OllamaMessage]) -> list[Json]:
    """The chat messages that mean the same. Calls and results without ids, as most clients send them, get some: templates of
    Mistral need nine letters and digits.
    """
    found: list[Json] = []
    unanswered: list[OllamaCall] = []
    count = 0
    for message in messages:
        shown: Json = {"role": message.role, "content": message.content or "", "reasoning_content": message.thinking}
        found.append(shown)
        if message.tool_calls:
            unanswered = []
            for call in message.tool_calls:
                count += 1
                unanswered.append(OllamaCall(id=call.id or f"call{count:05}", function=call.function))
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": dict(call.function)} for call in unanswered
            ]
        elif message.role == "tool":
            shown |= {"name": message.tool_name, "tool_call_id": message.tool_call_id or _answered(message, unanswered)}
    return found


def _answered(message: OllamaMessage, unanswered: list[OllamaCall]) -> str | None:
    """Take out the call whose result a message is: the first one, of its tool if it names one. Returns: its id."""
    for call in unanswered:
        if message.tool_name in (None, call.function.name):
            unanswered.remove(call)
            return call.id
    return None


def _past_images(turns: Any) -> set[int]:
    """The turns before the model's last one, and results, that have images."""
    roles = [(as_object(turn) or {}).get("role") for turn in items(turns) or ()]
    last = max((at for at, role in enumerate(roles) if role == "assistant"), default=-1)
    past = (at for at, role in enumerate(roles) if at < last or role == "tool")
    return {at for at in past if (as_object(turns[at]) or {}).get("images")}


def _without_images(turn: Json) -> Json:
    kept = {name: value for name, value in turn.items() if name != "images"}
    return {**kept, "content": "\n".join(text for text in (turn.get("content"), named("image")) if text)}


class OllamaChatRequest(_Call):
    """Body of `POST /api/chat`. Tools need no type."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = []
    """Empty: the client only wants the model to be loaded."""
    tools: list[dict[str, Any]] | None = None

    @staticmethod
    def left_out(body: Json) -> list[str]:
        """The images of earlier turns and of results."""
        return ["messages.images"] if _past_images(body.get("messages")) else []

    @field_validator("messages", mode="before")
    @classmethod
    def _name_images(cls, value: Any) -> Any:
        past = _past_images(value)
        return [_without_images(turn) if at in past else turn for at, turn in enumerate(value)] if past else value

    def chat_request(self) -> Json:
        """The body of the chat call that means the same; validating it checks what is not checked here."""
        body = {**self.shared(), "messages": chat_messages(self.messages)}
        if self.tools:
            body["tools"] = [{**tool, "type": tool.get("type") or "function"} for tool in self.tools]
        return body


class GenerateRequest(_Call):
    """Body of `POST /api/generate`. `raw`: the prompt is continued, without the chat template."""

    prompt: str = ""
    """Empty: the client only wants the model to be loaded."""
    system: str | None = None
    raw: bool | None = False
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    images: _Images | None = None
    context: Annotated[list[Any], Field(max_length=0)] | None = None

    def chat_request(self) -> Json:
        """The body of the chat call that means the same."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.shared(), "messages": [*system, {"role": "user", "content": self.prompt}]}

    def completion_request(self) -> Json:
        """The body of the completion call that means the same."""
        return {"max_tokens": None, **self.shared(), "prompt": self.prompt}


class ShowRequest(_Named):
    """Body of `POST /api/show`. `name`: the earlier name of `model`."""

    WITHOUT_EFFECT = frozenset({"options", "system", "template"})
    name: Annotated[str, Field(max_length=1024)] | None = None
    verbose: bool | None = None

    @property
    def wanted(self) -> str | None:
        """Name of the model."""
        return self.model or (self.name and self.name.removesuffix(":latest"))


class EmbedRequest(_Named):
    """Body of `POST /api/embed`. `truncate`: cut what is longer than the model takes."""

    input: str | list[str]
    truncate: bool | None = True
    dimensions: int | None = None

    def embedding_request(self) -> Json:
        """The body of `/v1/embeddings` that means the same."""
        cut = {} if self.truncate is False else {"truncate_prompt_tokens": -1}
        return {"model": self.model, "input": self.input, "dimensions": self.dimensions, **cut}


class OllamaEmbeddingsRequest(_Named):
    """Body of `POST /api/embeddings`, the older call."""

    prompt: str

    def embedding_request(self) -> Json:
        """The body of `/v1/embeddings` that means the same; vectors are not normalized."""
        return {"model": self.model, "input": self.prompt, "normalize": False, "truncate_prompt_tokens": -1}
