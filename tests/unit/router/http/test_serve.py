"""What a client is told about fields that have no effect."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from router.http.client import Client, note_client
from router.http.serve import _note_ignored, caller_from, warnings_of


@pytest.mark.parametrize(
    ("highest", "priority", "used", "named"),
    [
        (0, -5, 0, True),
        (0, 0, 0, False),
        (0, 7, 7, False),
        (10, 3, 10, True),
        (-9, -9, -9, False),
        (10, None, 10, False),
    ],
)
def test_a_priority_beyond_the_key_s_class_is_named(highest: int, priority: int | None, used: int, named: bool) -> None:
    request = Request({"type": "http", "headers": []})
    note_client(request.scope, Client("key", highest))
    assert caller_from(request, None, priority).priority == used
    assert warnings_of(request) == ([(b"x-kvrelay-ignored", b"priority")] if named else [])


def test_all_fields_without_effect_are_in_one_header() -> None:
    request = Request({"type": "http", "headers": []})
    _note_ignored(request, "temprature, x")
    caller_from(request, None, -1)
    assert warnings_of(request) == [(b"x-kvrelay-ignored", b"temprature, x, priority")]
