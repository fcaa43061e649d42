"""The bodies of pooling calls: what is accepted, what is refused with which sentence, and that all is documented."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.paths import ROOT

from common.base.errors import BadRequest
from router.http.body_model import BodyModel
from router.http.openai.parse_body import validated
from router.http.openai.unknown_fields import unknown_fields
from router.http.pooling.requests import MAX_INPUTS, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_shape_of_input_becomes_a_list(given: Any, expected: Any) -> None:
    assert validated({"input": given}, EmbeddingRequest).input == expected


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (EmbeddingRequest, {"input": []}, "input", "must not be empty"),
        (EmbeddingRequest, {"input": [[1], []]}, "input", "must not be empty"),
        (EmbeddingRequest, {"input": [1, "a"]}, "input", "must be a string, a list of strings"),
        (EmbeddingRequest, {"input": [True]}, "input", "must be a string, a list of strings"),
        (EmbeddingRequest, {"input": ["a"] * (MAX_INPUTS + 1)}, "input", "at most 2048 inputs in one request"),
        (EmbeddingRequest, {}, None, "give either input or messages"),
        (EmbeddingRequest, {"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        (EmbeddingRequest, {"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        (EmbeddingRequest, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
        (PoolingRequest, {"input": "a", "task": "guess"}, "task", "'embed'"),
        (RerankRequest, {"query": "a", "documents": []}, "documents", "at least 1 item"),
        (RerankRequest, {"query": "a", "documents": [{"title": "b"}]}, "documents", "required"),
        (RerankRequest, {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048 documents"),
        (RerankRequest, {"documents": ["b"]}, "query", "required"),
        (ScoreRequest, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 texts and text_2 1"),
        (ScoreRequest, {"text_1": "a", "text_2": []}, "text_2", "at least 1 item"),
        (ScoreRequest, {"queries": ["a", "b"], "items": ["c"]}, "queries", "queries has 2 texts and items 1"),
        (ScoreRequest, {"queries": "a", "documents": []}, "documents", "at least 1 item"),
        (ScoreRequest, {"documents": "a"}, "text_1", "required"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    kind: type[BodyModel], body: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)) as refusal:
        validated(body, kind)
    assert refusal.value.param == param
    assert len(refusal.value.message) < 400


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_vllms_other_names_of_what_is_scored_are_known(names: tuple[str, str]) -> None:
    fields = {names[0]: "a", names[1]: ["b", "c"]}
    body = validated(fields, ScoreRequest)
    assert (body.text_1, body.text_2, body.names) == (["a"], ["b", "c"], names)
    assert unknown_fields(fields, ScoreRequest) == []


def test_documents_are_texts_or_objects_with_a_text() -> None:
    body = validated({"query": "q", "documents": ["a", {"text": "b", "id": 1}]}, RerankRequest)
    assert body.documents == ["a", "b"]


@pytest.mark.parametrize("kind", [EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest])
def test_every_field_is_documented(kind: type[BodyModel]) -> None:
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "api.md").read_text("utf-8")))
    assert not set(kind.model_fields) - documented
