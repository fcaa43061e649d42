"""JSON of answers."""

from __future__ import annotations

import json

import pytest

from router.http.json_body import sse, to_json


@pytest.mark.parametrize("text", ["é", "\ud800"])
def test_numbers_that_json_does_not_have_are_null(text: str) -> None:
    body = to_json({"embedding": [float("nan"), float("inf"), -float("inf"), 1.5], "text": text})
    found = json.loads(body, parse_constant=pytest.fail)
    assert found == {"embedding": [None, None, None, 1.5], "text": text.replace("\ud800", "?")}


def test_an_event_is_one_line_also_where_lines_end_as_in_unicode() -> None:
    text = "a\u2028b\u2029c\u0085d\ve\x1cf\\u2028"
    event = sse({"text": text})
    assert len(event.decode().splitlines()) == 2, "the data and the empty line behind it"
    assert json.loads(event.removeprefix(b"data: ")) == {"text": text}
