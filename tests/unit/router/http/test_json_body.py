"""JSON of answers."""

from __future__ import annotations

import json

import pytest

from router.http import json_body
from router.http.json_body import large_json, sse, to_json


@pytest.mark.parametrize("text", ["é", "\ud800"])
def test_numbers_that_json_does_not_have_are_null(text: str) -> None:
    body = to_json({"embedding": [float("nan"), float("inf"), -float("inf"), 1.5], "text": text})
    found = json.loads(body, parse_constant=pytest.fail)
    assert found == {"embedding": [None, None, None, 1.5], "text": text.replace("\ud800", "?")}


def test_large_answers_are_made_in_pieces_and_equal_those_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[float(column), float("nan")] for column in range(1000)]
    answer = {
        "id": "a\u2028",
        "data": [{"index": 0, "data": rows}, {"index": 1, "data": []}],
        "usage": {"n": 1},
        "x": None,
        "e": {},
    }
    at_once = to_json(answer)
    pieces: list[int] = []

    def one_piece(value: object) -> bytes:
        pieces.append(len(to_json(value)))
        return to_json(value)

    monkeypatch.setattr(json_body, "to_json", one_piece)
    assert large_json({**answer, "data": iter(answer["data"])}) == at_once
    assert max(pieces) < 20
    assert large_json({"data": iter([])}) == b'{"data":[]}'


def test_an_event_is_one_line_also_where_lines_end_as_in_unicode() -> None:
    text = "a\u2028b\u2029c\u0085d\ve\x1cf\\u2028"
    event = sse({"text": text})
    assert len(event.decode().splitlines()) == 2, "the data and the empty line behind it"
    assert json.loads(event.removeprefix(b"data: ")) == {"text": text}
