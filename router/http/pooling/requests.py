"""Bodies of the calls of pooling models. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from router.http.body_model import BodyModel
from router.http.openai.chat_messages import Message
from router.http.openai.checks import MAX_INT, FieldsError, bounded, items, texts_or_token_ids
from router.http.openai.shared_fields import MAX_PRIORITY, MAX_REQUEST_ID, TruncateTokens

MAX_INPUTS = 2048
"""Texts, documents or pairs of one call; OpenAI's limit for embeddings."""
MAX_CHAT_MESSAGES = 512


class PoolingFields(BodyModel):
    """Fields that all these calls share."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = 0
    request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID)] | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    """Cut longer inputs to this many tokens, with special tokens; -1: to what the model takes."""


class _Inputs(PoolingFields):
    """Texts, token ids, or a conversation."""

    input: list[str] | list[list[int]] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)] | None = None
    """A conversation, which the chat template turns into one input."""
    add_special_tokens: bool | None = None
    """Default: true for texts, false for a conversation."""
    add_generation_prompt: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    truncation_side: Literal["left", "right"] | None = None
    """Which end of a text is cut; default: right."""
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    """Keep this many leading dimensions, and normalize again."""
    normalize: bool | None = None
    """Scale vectors to length 1; default: true."""

    @field_validator(
        "input", mode="before", json_schema_input_type=str | list[int] | list[str] | list[list[int]] | None
    )
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        if value is None:
            return None
        inputs = texts_or_token_ids(value, MAX_INPUTS, "inputs in one request")
        if not inputs or [] in inputs:
            raise ValueError("must not be empty")
        return inputs

    @model_validator(mode="after")
    def _check_source(self) -> _Inputs:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages")
        return self


class EmbeddingRequest(_Inputs):
    """Body of `POST /v1/embeddings`."""


class PoolingRequest(_Inputs):
    """Body of `POST /pooling`: one vector per token, unless `task` asks for something else."""

    task: Literal["embed", "token_embed", "classify", "score"] | None = None


class Document(BodyModel):
    """A document of a rerank call."""

    text: str


class ComparisonFields(PoolingFields):
    """Fields of the calls that compare texts."""

    use_activation: bool | None = None
    """False: the score of a cross-encoder before its activation function; true, the default: behind it."""
    softmax: Annotated[bool | None, Field(exclude=True)] = None
    activation: Annotated[bool | None, Field(exclude=True)] = None
    """Both: former names of `use_activation`."""

    @property
    def activates(self) -> bool:
        """Whether the scores of a cross-encoder pass its activation function."""
        return False not in (self.use_activation, self.softmax, self.activation)


class RerankRequest(ComparisonFields):
    """Body of `POST /v1/rerank`, in the shape that Cohere and Jina use. `documents` are texts once validated."""

    query: str
    documents: Annotated[list[str], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """Number of best documents to return; 0: all."""
    return_documents: bool | None = True
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None

    @field_validator("documents", mode="before", json_schema_input_type=list[str | Document])
    @classmethod
    def _as_texts(cls, value: Any) -> Any:
        documents = items(bounded(value, MAX_INPUTS, "documents in one request"))
        if documents is None:
            return value
        return [each if isinstance(each, str) else Document.model_validate(each).text for each in documents]


_NAMES = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")
"""vLLM's names of the two fields of `/v1/score`."""


class ScoreRequest(ComparisonFields):
    """Body of `POST /v1/score`: one text against each of several, or two lists of the same length pair by pair. Both are lists
    once validated.
    """

    text_1: Annotated[list[str], Field(min_length=1, validation_alias=AliasChoices(*_NAMES[0]))]
    text_2: Annotated[list[str], Field(min_length=1, validation_alias=AliasChoices(*_NAMES[1]))]
    _names: tuple[str, str] = PrivateAttr(("text_1", "text_2"))

    @field_validator("text_1", "text_2", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else bounded(value, MAX_INPUTS, "texts in one request")

    @model_validator(mode="wrap")
    @classmethod
    def _check_lengths(cls, value: Any, handler: ModelWrapValidatorHandler[ScoreRequest]) -> ScoreRequest:
        body = handler(value)
        first, second = (next(name for name in names if name in value) for names in _NAMES)
        body._names = first, second
        check_lengths(len(body.text_1), len(body.text_2), body.names)
        return body

    @property
    def names(self) -> tuple[str, str]:
        """The client's names of the two fields."""
        return self._names


def check_lengths(first: int, second: int, names: tuple[str, str] = ("text_1", "text_2")) -> None:
    """Check that the numbers of texts fit together: one and any number, or equal numbers. Raises: FieldsError."""
    if first not in (1, second):
        one, other = names
        raise FieldsError(
            one, f"{one} has {first} texts and {other} {second}: {one} must be one text, or both must have equally many"
        )
