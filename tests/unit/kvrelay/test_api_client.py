from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from common.base.errors import ConfigError, DeadlineExceeded
from kvrelay import api_client
from kvrelay.api_client import (
    ApiAnswer,
    ApiClient,
    NotAnApiAnswer,
    ServerUnreachable,
    run_workers,
    wait_before_retry_s,
)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits before retries, none of which takes time."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(api_client.asyncio, "sleep", sleep)
    return waited


def ask(answer: Callable[[httpx.Request], httpx.Response], *, attempts: int = 4, key: str = "") -> ApiAnswer:
    async def main() -> ApiAnswer:
        transport = httpx.MockTransport(answer)
        async with ApiClient(
            "http://x/v1/", key, connections=2, timeout_s=1.0, attempts=attempts, transport=transport
        ) as client:
            return await client.post("/v1/completions", {"prompt": "a"})

    return asyncio.run(main())


def test_an_answer_has_status_id_and_body() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://x/v1/completions"
        assert request.headers["authorization"] == "Bearer k"
        return httpx.Response(400, json={"error": {}}, headers={"x-request-id": "r1"})

    assert ask(answer, key="k") == ApiAnswer(400, "r1", {"error": {}})


def test_a_key_is_sent_as_the_bytes_that_the_router_compares() -> None:
    """One that is not ASCII once ended every command with a traceback."""
    sent: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.extend(value for name, value in request.headers.raw if name.lower() == b"authorization")
        return httpx.Response(200, json={})

    ask(answer, key="cl\xe9")
    assert sent == ["Bearer cl\xe9".encode()]


@pytest.mark.parametrize("key", ["key\r", "a\nb", "\udcff"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="contains a line end") as caught:
        ask(lambda _: httpx.Response(200, json={}), key=key)
    assert key not in str(caught.value)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ServerUnreachable, match="is not an http"):
        ApiClient("http://127.0.0.1:99999", connections=1, timeout_s=1.0)


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_busy_server_is_asked_again_no_sooner_than_it_says(status: int, waits: list[float]) -> None:
    answers = iter([httpx.Response(status, json={}, headers={"retry-after": "7"}), httpx.Response(200, json={"a": 1})])
    assert ask(lambda _: next(answers)).body == {"a": 1}
    [wait] = waits
    assert 7.0 <= wait <= 7.0 * 1.25


def test_the_last_refusal_is_the_answer(waits: list[float]) -> None:
    assert ask(lambda _: httpx.Response(429, json={"error": {}})).status_code == 429
    assert len(waits) == 3
    assert waits == sorted(waits)
    assert waits[0] <= 0.5


def test_waiting_as_long_as_asked_uses_up_no_attempt_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a hundred lines of a batch under a key with ten requests a minute used up its attempts."""
    later = {"retry-after": "60"}
    answers = iter([*(httpx.Response(429, json={}, headers=later) for _ in range(9)), httpx.Response(200, json={})])
    assert ask(lambda _: next(answers)).status_code == 200
    monkeypatch.setattr(api_client, "_LONGEST_ASKED_S", 0.0)
    assert ask(lambda _: httpx.Response(429, json={}, headers=later)).status_code == 429


def test_an_answer_that_cannot_be_decompressed_is_told(waits: list[float]) -> None:
    gzip = httpx.Headers({"content-encoding": "gzip"})
    with pytest.raises(NotAnApiAnswer, match=r"http://x/v1/completions answers what cannot be decompressed"):
        ask(lambda _: httpx.Response(200, stream=httpx.ByteStream(b"{}"), headers=gzip))
    assert not waits


def test_a_lost_connection_is_retried_and_named_in_the_end() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    with pytest.raises(ServerUnreachable, match="http://x does not answer: connection refused"):
        ask(refuse)


@pytest.mark.parametrize("url", ["127.0.0.1:18300", "localhost:18300", "http://", "http://127.0.0.1:8x", ""])
def test_a_malformed_url_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ServerUnreachable, match="URL"):
        ApiClient(url, connections=1, timeout_s=1.0)


def test_an_answer_that_takes_too_long_is_not_asked_for_again(waits: list[float]) -> None:
    def never(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("", request=request)

    with pytest.raises(DeadlineExceeded, match="within 1 s"):
        ask(never)
    assert not waits


@pytest.mark.parametrize("text", ["<html>" + 1000 * "x", "[1]"])
def test_something_else_than_a_json_object_is_told_with_its_status(waits: list[float], text: str) -> None:
    with pytest.raises(NotAnApiAnswer, match=r"answers 307 .* is this a server of the OpenAI API") as error:
        ask(lambda _: httpx.Response(307, text=text))
    assert error.value.message.endswith("? " + text[:200])
    assert not waits


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxys_error_page_is_asked_again(status: int) -> None:
    answers = iter([httpx.Response(status, text="<html>"), httpx.Response(200, json={"a": 1})])
    assert ask(lambda _: next(answers)).body == {"a": 1}
    with pytest.raises(NotAnApiAnswer, match=f"answers {status}"):
        ask(lambda _: httpx.Response(status, text="<html>"))


def test_the_servers_own_deadline_is_an_answer(waits: list[float]) -> None:
    assert ask(lambda _: httpx.Response(504, json={"error": {}})).status_code == 504
    assert not waits


def test_waits_grow_and_are_bounded() -> None:
    assert wait_before_retry_s(1, {}) <= 0.5
    assert wait_before_retry_s(30, {}) == 30.0
    assert wait_before_retry_s(2000, {}) == 30.0  # hours later: 2.0**2000 is no number
    assert 0 <= wait_before_retry_s(1, {"retry-after": "nan"}) <= 0.5
    assert 300 <= wait_before_retry_s(1, {"retry-after": "300"}) <= 375  # it was 30 s, and all attempts were too early
    assert wait_before_retry_s(1, {"retry-after": "1e9"}) == 3600.0
    assert wait_before_retry_s(1, {"retry-after": "Mon, 01 Jan 2035 00:00:00 GMT"}) <= 0.5


def test_workers_take_an_item_when_they_are_free() -> None:
    running, most, taken = 0, 0, 0

    async def work(item: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert taken <= item + 3
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1

    def items() -> Any:
        nonlocal taken
        for item in range(20):
            taken += 1
            yield item

    async def main() -> None:
        await run_workers(items(), work, 3)

    asyncio.run(main())
    assert (taken, running) == (20, 0)


def test_the_first_error_of_a_worker_is_raised_plainly() -> None:
    async def work(item: int) -> None:
        raise ValueError(item)

    with pytest.raises(ValueError, match="0"):
        asyncio.run(run_workers(range(5), work, 2))
