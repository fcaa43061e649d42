from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.stub_api import Reply, stub_api
from typer.testing import CliRunner

from kvrelay.chat.cli import app
from kvrelay.chat.stream import ChatClient, ChatFailed, TextPiece


def events(*data: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(each)}\n\n" for each in data] + ["data: [DONE]\n\n"] * done
    return "".join(lines).encode()


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def answer(path: str, body: dict[str, Any]) -> Reply:
    content = body["messages"][-1]["content"]
    if content == "refuse":
        return 400, {}, {"error": {"message": "not this"}}
    return 200, {"content-type": "text/event-stream"}, events(delta(role="assistant"), delta(content=content.upper()))


def test_lines_of_a_pipe_are_answered_one_by_one() -> None:
    with stub_api(answer) as stub:
        args = ["--url", stub.url + "/v1", "--system", "s", "--temperature", "0", "--max-tokens", "5"]
        result = CliRunner().invoke(app, args, input="hello\nyou\n")
    assert (result.exit_code, result.stdout) == (0, "HELLO\nYOU\n")
    path, body = stub.asked[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 5,
        "stream": True,
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}],
    }


def test_a_line_of_a_pipe_that_begins_like_a_command_or_is_not_utf8_is_a_message() -> None:
    with stub_api(answer) as stub:
        result = CliRunner().invoke(app, ["--url", stub.url], input=b"/usr/bin/env prints what?\nh\xff\n/reset\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "/USR/BIN/ENV PRINTS WHAT?\nH\ufffd\n"


def test_a_refused_message_of_a_pipe_is_said_and_the_exit_code_is_one() -> None:
    with stub_api(answer) as stub:
        result = CliRunner().invoke(app, ["--url", stub.url], input="refuse\nyou\n")
    assert (result.exit_code, result.stdout) == (1, "YOU\n")
    assert "not this" in result.stderr


def test_an_unknown_model_and_a_missing_server_are_said_before_the_chat() -> None:
    with stub_api(answer) as stub:
        wrong = CliRunner().invoke(app, ["--url", stub.url, "--model", "other"])
    assert wrong.exit_code == 2
    assert "no model 'other', it has m" in wrong.stderr
    assert CliRunner().invoke(app, ["--url", stub.url]).exit_code == 3


def test_a_refused_key_is_said_before_the_chat() -> None:
    with stub_api(answer) as stub:
        stub.key = "right"
        wrong = CliRunner().invoke(app, ["--url", stub.url, "--api-key", "wrong"])
        right = CliRunner().invoke(app, ["--url", stub.url, "--api-key", "right"], input="hello\n")
    assert wrong.exit_code == 3
    assert "answers 401: it refuses the API key" in wrong.stderr
    assert right.stdout == "HELLO\n"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(200, content=events(delta(content="a"), done=False)), "broke off"),
        (httpx.Response(200, content=events(delta(content="a"), {"error": {"message": "late"}})), "late"),
        (httpx.Response(200, content=events({"x": 1})), "not an event"),
        (httpx.Response(502, content=b"<html>"), "answers 502"),
        (httpx.Response(200, stream=httpx.ByteStream(b"{}"), headers={"content-encoding": "gzip"}), "http://x: "),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(response: httpx.Response, message: str) -> None:
    transport = httpx.MockTransport(lambda _: response)
    with (
        ChatClient("http://x", "", timeout_s=1.0, transport=transport) as client,
        pytest.raises(ChatFailed, match=message),
    ):
        list(client.stream({}))


@pytest.mark.parametrize(
    "reasoning", [{"reasoning_content": "r"}, {"reasoning": "r"}, {"reasoning_content": "r", "reasoning": "r"}]
)
def test_pieces_have_text_and_reasoning(reasoning: Any) -> None:
    stream = httpx.Response(200, content=events(delta(**reasoning), delta(content="c"), {"choices": []}))
    with ChatClient("http://x", "", timeout_s=1.0, transport=httpx.MockTransport(lambda _: stream)) as client:
        assert list(client.stream({})) == [TextPiece("", "r"), TextPiece("c")]


def test_line_ends_of_unicode_within_an_answer_are_text() -> None:
    text = "a\u2028b\u0085c"
    event = json.dumps(delta(content=text), ensure_ascii=False)
    body = f"data: {event}\r\n\r\ndata: [DONE]".encode()
    stream = httpx.Response(200, stream=httpx.ByteStream(body))
    with ChatClient("http://x", "", timeout_s=1.0, transport=httpx.MockTransport(lambda _: stream)) as client:
        assert list(client.stream({})) == [TextPiece(text)]
