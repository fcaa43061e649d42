"""The short way of the two hot calls gives the same answers as the framework's, and text events the same bytes."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from common.base.errors import BadRequest
from router.http.api_keys import KeyGuard
from router.http.direct_endpoints import DirectEndpoints
from router.http.format import FormatOptions
from router.http.json_body import sse, to_json
from router.http.key_limits import ApiKeys
from router.http.openai.chat_format import ChatFormat
from router.http.openai.completion_format import CompletionFormat
from router.http.responses import JsonResponse
from router.requests.request import Delta
from router.text.tokenizer import Tokenizer


def app() -> FastAPI:
    made = FastAPI()

    @made.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.body()
        if body == b"bad":
            raise BadRequest("no")
        if body == b"bug":
            raise ZeroDivisionError
        return PlainTextResponse(body[::-1])

    @made.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def on_error(request: Request, error: Exception) -> Response:
        return PlainTextResponse(type(error).__name__, getattr(error, "http_status", 500))

    made.add_exception_handler(Exception, on_error)
    return made


def guard(inner: ASGIApp) -> ASGIApp:
    return KeyGuard(inner, ApiKeys(("key",)), lambda status: None)


def call(path: str, method: str = "POST", body: bytes = b"", key: str = "key") -> tuple[int, str]:
    async def send() -> tuple[int, str]:
        transport = httpx.ASGITransport(DirectEndpoints(app(), guard))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
            answer = await http.request(method, path, content=body, headers={"authorization": f"Bearer {key}"})
            return answer.status_code, answer.text

    return asyncio.run(send())


def test_hot_calls_reach_their_endpoint_and_others_the_framework() -> None:
    assert call("/v1/completions", body=b"abc") == (200, "cba")
    assert call("/health", "GET") == (200, '{"status":"ok"}')
    assert call("/v1/completions", "GET")[0] == 405
    assert call("/v1/completions/", body=b"abc")[0] in (307, 404)


def test_errors_and_bugs_get_the_applications_answer() -> None:
    assert call("/v1/completions", body=b"bad") == (400, "BadRequest")
    assert call("/v1/completions", body=b"bug") == (500, "ZeroDivisionError")


def test_the_short_way_wants_a_key() -> None:
    assert call("/v1/completions", body=b"abc", key="other")[0] == 401


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("text", ["a", ' "quoted" \\ ', "\n\t\x00\x1f\x7f", "äß漢🙂", "\u2028</script>", "text"])
def test_a_text_event_is_the_event_of_its_chunk(text: str, usage: bool) -> None:
    options = FormatOptions('cmpl-"1"', "text", usage_in_stream=usage)
    for form in (ChatFormat(options, cast("Tokenizer", None)), CompletionFormat(options, cast("Tokenizer", None), 2)):
        for index in (0, 1, 0):
            (chunk,) = form.delta(Delta(text, [5], None), index)
            assert form.text_event(text, index) == sse(chunk)


def test_json_is_compact_and_survives_half_a_surrogate_pair() -> None:
    """A client may send one (as an escape, in its own name for the request), and it is repeated in answers."""
    value = {"a": "\ud83d", "b": ["ü🙂\u2028\x7f\n", None, True, 1.5, 10**20]}
    assert to_json(value) == '{"a":"?","b":["ü🙂\\u2028\x7f\\n",null,true,1.5,100000000000000000000]}'.encode()
    value["a"] = ""
    assert json.loads(to_json(value)) == value


def test_a_json_response_has_its_length_and_the_given_headers() -> None:
    response = JsonResponse({"a": "ü"}, 503, [(b"x-a", b"1")])
    assert (response.status_code, response.body) == (503, '{"a":"ü"}'.encode())
    assert dict(response.raw_headers) == {
        b"content-type": b"application/json",
        b"content-length": b"10",
        b"x-a": b"1",
    }
