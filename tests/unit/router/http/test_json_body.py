"""JSON of answers."""

from __future__ import annotations

import json

import pytest

from router.http.json_body import to_json


@pytest.mark.parametrize("text", ["é", "\ud800"])
def test_numbers_that_json_does_not_have_are_null(text: str) -> None:
    body = to_json({"embedding": [float("nan"), float("inf"), -float("inf"), 1.5], "text": text})
    found = json.loads(body, parse_constant=pytest.fail)
    assert found == {"embedding": [None, None, None, 1.5], "text": text.replace("\ud800", "?")}
