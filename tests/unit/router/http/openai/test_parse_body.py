"""What a wrong body costs: checking stops at the first wrong item of a list."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from common.base.errors import BadRequest
from router.http.anthropic.messages_request import MessagesRequest
from router.http.body_model import BodyModel
from router.http.ollama.requests import EmbedRequest, OllamaChatRequest
from router.http.openai.chat_request import ChatRequest
from router.http.openai.checks import FieldsError
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.parse_body import completion_request, read_object, validated
from router.http.pooling.requests import EmbeddingRequest, RerankRequest
from router.http.responses_api.responses_request import ResponsesRequest

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
MANY = [1.5] * 5000
"""Neither texts, objects nor token ids."""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "a", "guided_choice": MANY}),
        (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": MANY}}),
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": MANY}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(5000)}}),
        (CompletionRequest, {"prompt": MANY}),
        (ChatRequest, {"messages": MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": MANY}]}),
        (ChatRequest, {"messages": [], "tools": MANY}),
        (MessagesRequest, {"max_tokens": 1, "messages": [], "stop_sequences": MANY}),
        (MessagesRequest, {"max_tokens": 1, "messages": [], "tools": MANY}),
        (ResponsesRequest, {"input": MANY}),
        (ResponsesRequest, {"input": "a", "tools": MANY}),
        (ResponsesRequest, {"input": "a", "metadata": {str(i): 1 for i in range(5000)}}),
        (OllamaChatRequest, {"messages": MANY}),
        (OllamaChatRequest, {"messages": [], "options": {"stop": MANY}}),
        (EmbedRequest, {"input": MANY}),
        (EmbeddingRequest, {"input": MANY}),
        (RerankRequest, {"query": "a", "documents": MANY}),
    ],
)
def test_a_body_with_thousands_of_wrong_items_has_few_errors(kind: type[BodyModel], body: dict[str, Any]) -> None:
    """A report of a million takes 20 s of the interpreter and 2 GB: the router lost its nodes meanwhile."""
    with pytest.raises(BadRequest) as caught:
        validated(body, kind)
    reported = caught.value.__cause__
    assert isinstance(reported, ValidationError)
    assert reported.error_count() < 100


def test_every_model_of_a_body_ends_lists_at_the_first_wrong_item() -> None:
    def below(kind: type[BaseModel]) -> set[type[BaseModel]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    found = [kind for kind in below(BaseModel) if kind.__module__.startswith("router.http.")]
    assert len(found) > 20
    assert not [
        kind
        for kind in found
        if not issubclass(kind, BodyModel) and kind.__module__.rpartition(".")[2] != "answer_types"
    ]


def test_fields_that_would_change_the_answer_are_refused_unless_the_value_has_no_effect() -> None:
    for harmless in ({"verbosity": "medium"}, {"verbosity": None}, {"web_search_options": None}, {"functions": []}):
        completion_request({**ASKED, **harmless}, ChatRequest)
    for wanted in ({"verbosity": "low"}, {"web_search_options": {}}, {"functions": [{"name": "f"}]}):
        with pytest.raises(BadRequest, match="not supported") as refusal:
            completion_request({**ASKED, **wanted}, ChatRequest)
        assert [refusal.value.param] == list(wanted)


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    assert read_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    with pytest.raises(BadRequest, match="not valid JSON"):
        read_object(b"\xef\xbb\xbf\xef\xbb\xbf{}")


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (ResponsesRequest, {"input": []}, "input: List should have at least 1 item"),
        (OllamaChatRequest, {"think": ""}, "think: String should have at least 1 character"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "function"}},
            "function: ",
        ),
    ],
)
def test_the_error_of_a_field_of_several_forms_is_that_of_the_form_that_was_meant(
    kind: type[BodyModel], body: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadRequest, match=said):
        validated(body, kind)


CALL: dict[str, Any] = {"type": "function", "function": {"name": 3, "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "fields", "place"),
    [
        (ChatRequest, {"tool_choice": {"type": "function"}}, "tool_choice.function"),
        (ChatRequest, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        (
            ChatRequest,
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            "messages.0.tool_calls.0.function.name",
        ),
        (ResponsesRequest, {"input": 3}, "input"),
        (ResponsesRequest, {"input": [3]}, "input.0"),
        (ResponsesRequest, {"input": [{"role": "user", "content": 3}]}, "input.0.content"),
        (ResponsesRequest, {"input": [{"type": None, "role": "user", "content": "a"}]}, "input.0.type"),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input.0.content.0.text"),
        (ResponsesRequest, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (ResponsesRequest, {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            ResponsesRequest,
            {"tools": [{"type": "x"}, {"type": "function", "name": "f", "parameters": 3}]},
            "tools.0.parameters",
        ),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (MessagesRequest, {"system": [{"type": "x"}]}, "system.0.type"),
    ],
)
def test_the_place_of_an_error_has_only_names_of_the_body(
    kind: type[BodyModel], fields: dict[str, Any], place: str
) -> None:
    needed: dict[str, Any] = {"input": "a"} if kind is ResponsesRequest else {**ASKED, "max_tokens": 1}
    with pytest.raises(BadRequest) as refused:
        validated({**needed, **fields}, kind)
    assert refused.value.message.partition(": ")[0] == place
    assert refused.value.param == place.partition(".")[0]


class _Pair(BodyModel):
    first: int = 2
    last: int = 1

    @model_validator(mode="after")
    def _check_together(self) -> _Pair:
        raise FieldsError("last", "first must not be above last")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionRequest, {"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        (CompletionRequest, {"prompt": "a", "stream_options": {}}, "stream_options"),
        (CompletionRequest, {"prompt": [1], "suffix": "a"}, "suffix"),
        (ChatRequest, {**ASKED, "tool_choice": "required"}, "tool_choice"),
        (ChatRequest, {**ASKED, "top_logprobs": 1}, "top_logprobs"),
        (ChatRequest, {**ASKED, "detokenize": False, "stop": "a"}, "stop"),
        (EmbeddingRequest, {}, None),
        (_Pair, {}, "last"),
    ],
)
def test_errors_about_several_fields_name_one(kind: type[BodyModel], fields: Any, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        validated(fields, kind)
    assert caught.value.param == param
