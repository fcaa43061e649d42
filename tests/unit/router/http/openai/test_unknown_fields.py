"""Fields that no known API has, and that every known one is documented."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

from common.base.errors import BadRequest
from router.http.anthropic.messages_request import MessagesRequest
from router.http.ollama.requests import OllamaChatRequest
from router.http.openai.chat_request import ChatRequest
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.unknown_fields import known_fields, names_in_header, refuse_unknown, unknown_fields
from router.http.responses_api.responses_request import ResponsesRequest


def test_only_fields_that_no_api_has_are_unknown() -> None:
    body = {"model": "m", "temprature": 0, "metadata": {}, "use_beam_search": False, "messages": [], "x": 1}
    assert unknown_fields(body, ChatRequest) == ["temprature", "x"]
    assert unknown_fields(body, CompletionRequest) == ["temprature", "messages", "x"]


def test_names_within_objects_are_unknown_too() -> None:
    text = {"format": {"type": "text"}, "verbosity": "low"}
    assert unknown_fields({"input": "x", "text": text, "y": 1}, ResponsesRequest) == ["y", "text.verbosity"]
    config = {"format": None, "effort": "low", "efort": "low"}
    assert unknown_fields({"messages": [], "output_config": config}, MessagesRequest) == ["output_config.efort"]
    for odd in (None, "text", [1]):
        assert unknown_fields({"text": odd}, ResponsesRequest) == []


def test_tools_that_are_left_out_are_named_once() -> None:
    kinds = ["namespace", "function", "web_search", "web_search"]
    tools = [{"type": kind, "name": "x"} for kind in kinds]
    assert unknown_fields({"tools": tools}, ResponsesRequest) == ["tools.namespace", "tools.web_search"]
    for others in (tools[:1], [], None, "x", [1, {}], [1, {}, {"type": 5}, {"type": "function"}]):
        assert unknown_fields({"tools": others}, ResponsesRequest) == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [("temprature", "; did you mean 'temperature'?"), ("max_token", "; did you mean 'max_tokens'?"), ("@#", "")],
)
def test_a_refusal_suggests_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(BadRequest, match=f"unknown parameter '{name}'" + re.escape(hint) + "$") as refusal:
        refuse_unknown([name], CompletionRequest)
    assert (refusal.value.param, refusal.value.code) == (name, "unknown_parameter")
    refuse_unknown([], CompletionRequest)


def test_names_in_the_header_are_cut_printable_and_few() -> None:
    assert names_in_header(["a", "b\r\nc"]) == "a, b??c"
    long = names_in_header("x" * 10_000 for _ in range(10_000))
    assert long == ", ".join(["x" * 64] * 16)


_DOCUMENTED = frozenset(re.findall(r"`(\w+)`", (ROOT / "docs" / "api.md").read_text("utf-8")))


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_field_is_documented(kind: type[ChatRequest] | type[CompletionRequest]) -> None:
    assert not known_fields(kind) - _DOCUMENTED


@pytest.mark.parametrize("kind", [ResponsesRequest, MessagesRequest, OllamaChatRequest])
def test_fields_of_other_apis_without_effect_are_known_and_documented(
    kind: type[ResponsesRequest | MessagesRequest | OllamaChatRequest],
) -> None:
    assert known_fields(kind) & _DOCUMENTED >= kind.WITHOUT_EFFECT
