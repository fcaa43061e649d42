"""Every field that asks for structured output, and how they exclude each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.base.errors import BadRequest
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import parse_body
from router.structured.json_schema import WHITESPACE, json_schema_grammar
from router.structured.relaxed import Relaxed

ROW = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked(**fields: Any) -> tuple[str, str] | None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return parse_body(json.dumps(body).encode(), ChatRequest).grammar_source(Relaxed())


@pytest.mark.parametrize(
    ("fields", "param", "source"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": ROW}}},
            "response_format",
            json_schema_grammar(ROW),
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", json_schema_grammar({"type": "object"})),
        (
            {"response_format": {"type": "json_object", "schema": ROW}},
            "response_format",
            json_schema_grammar(ROW),
        ),
        ({"structured_outputs": {"json": ROW}}, "structured_outputs.json", json_schema_grammar(ROW)),
        (
            {"structured_outputs": {"json": ROW, "disable_additional_properties": True}},
            "structured_outputs.json",
            json_schema_grammar({**ROW, "additionalProperties": False}),
        ),
        (
            {"structured_outputs": {"json": ROW, "disable_any_whitespace": True}},
            "structured_outputs.json",
            json_schema_grammar(ROW, None),
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
            "structured_outputs.json_object",
            json_schema_grammar({"type": "object"}, " "),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", 'start: "a" | "b"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar", 'start: "a"'),
        ({"guided_json": ROW}, "guided_json", json_schema_grammar(ROW)),
        ({"guided_json": json.dumps(ROW), "guided_whitespace_pattern": ""}, "guided_json", None),
        ({"guided_choice": ["a"]}, "guided_choice", 'start: "a"'),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar", 'start: "a"'),
        ({"guided_regex": "a+"}, "guided_regex", None),
    ],
)
def test_each_field_makes_its_grammar(fields: dict[str, Any], param: str, source: str | None) -> None:
    found = asked(**fields)
    assert found is not None
    assert found[0] == param
    assert source in (None, found[1])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"guided_json": None, "guided_decoding_backend": "auto"},
    ],
)
def test_text_needs_no_grammar(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag"),
        ({"structural_tag": {"a": 1}}, "structural_tag", "not supported"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
        ({"guided_json": ROW, "guided_regex": "a"}, "guided_regex", "only one of guided_json and guided_regex"),
        (
            {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
            "response_format",
            "only one of guided_choice and response_format",
        ),
        ({"guided_choice": []}, "guided_choice", "at least one choice"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"divisibleBy": 2}},
                }
            },
            "response_format",
            "divisibleBy",
        ),
        ({"guided_json": True}, "guided_json", "guided_json"),
        ({"guided_json": ROW, "guided_whitespace_pattern": " " * 201}, "guided_whitespace_pattern", "200"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        asked(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"type": "array", "uniqueItems": True}},
        {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
        {"response_format": {"type": "json_object", "schema": {"type": "object", "uniqueItems": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
    ],
)
def test_what_no_grammar_enforces_is_noted_unless_the_client_is_strict(fields: dict[str, Any]) -> None:
    relaxed = Relaxed()
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    assert parse_body(json.dumps(body).encode(), ChatRequest).grammar_source(relaxed) is not None
    assert relaxed.names == ("uniqueItems",)


def test_white_space_is_bounded_by_default() -> None:
    found = asked(response_format={"type": "json_object"})
    assert found is not None
    assert json.dumps(WHITESPACE)[1:-1] in found[1]
