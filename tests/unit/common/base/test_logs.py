"""What log lines look like, and what libraries may not log."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from common.base import logs
from common.control.identities import AttemptKey


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(monkeypatch: pytest.MonkeyPatch, level: str, form: logs.LogFormat) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logs.configure(level, form)
    log = logging.getLogger("router.test")
    log.warning("%s failed at %s: %s", AttemptKey("cmpl-1", 2), "d0", "two\nlines\x1b[0m")
    log.debug("details")
    try:
        raise ValueError("a bug")
    except ValueError:
        log.exception("%s failed", AttemptKey("cmpl-2", 1))
    logging.getLogger("httpcore.http11").debug("send_request_headers Authorization: hidden")
    return out.getvalue().splitlines()


def test_text_has_one_line_a_message_whatever_it_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *traceback = lines(monkeypatch, "info", "text")
    assert first.endswith(r"WARNING router.test: cmpl-1#2 failed at d0: two\nlines\x1b[0m")
    assert second.endswith("ERROR   router.test: cmpl-2#1 failed")
    assert traceback[-1] == "ValueError: a bug"
    assert logs.recent()[-2] == first


def test_json_has_one_object_a_line_with_the_request_and_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = map(json.loads, lines(monkeypatch, "info", "json"))
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "warning",
        "logger": "router.test",
        "message": "cmpl-1#2 failed at d0: two\nlines\x1b[0m",
        "request_id": "cmpl-1",
        "attempt": 2,
    }
    assert (second["request_id"], second["attempt"]) == ("cmpl-2", 1)
    assert second["error"].endswith("ValueError: a bug")


def test_at_debug_libraries_that_show_headers_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "\n".join(lines(monkeypatch, "debug", "text"))
    assert "details" in said
    assert "hidden" not in said
