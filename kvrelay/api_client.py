"""An asynchronous client of the OpenAI API for the command line and for offline use: whole answers, with retries."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar, cast

import httpx
from pydantic_core import from_json, to_json

from common.base.errors import DeadlineExceeded, KvRelayError
from common.config.fields import HIGHEST_PORT
from kvrelay.served_models import authorization, base_url

T = TypeVar("T")

_RETRIED = (429, 502, 503)
_GATEWAY_TIMEOUT = 504
"""Status 504: a result if the server sends it, because its deadline passed; retried if a proxy sends it, without JSON."""
_SHOWN_BYTES = 200
_LONGEST_WAIT_S = 30.0
"""Longest pause between attempts, unless the server asks for more."""
_LONGEST_ASKED_S = 3600.0
_CONNECT_S = 10.0


class ServerUnreachable(KvRelayError):
    """No server of the OpenAI API answers at the address."""

    exit_code = 3


class NotAnApiAnswer(KvRelayError):
    """A response without a JSON object: a redirection, or the error page of a proxy."""

    code = "not_an_api_answer"


class ApiAnswer(NamedTuple):
    """A response with a JSON body. `request_id`: the server's id of the request."""

    status_code: int
    request_id: str
    body: dict[str, Any]


def wait_before_retry_s(attempt: int, headers: Mapping[str, str]) -> float:
    """Seconds to wait after the attempt of this number, from 1: grows exponentially, and is never less than what the
    server asks for in `retry-after`, up to an hour: a key's limits of tokens may ask for minutes."""
    asked_s = 0.0
    with contextlib.suppress(ValueError):  # a date, which our router does not send
        asked_s = float(headers.get("retry-after", ""))
    if math.isnan(asked_s):
        asked_s = 0.0
    growing_s = min(0.25 * 2 ** min(attempt, 16) * random.uniform(0.5, 1.0), _LONGEST_WAIT_S)
    # Spread, so that requests refused together do not come back together.
    return max(min(asked_s * random.uniform(1.0, 1.25), _LONGEST_ASKED_S), growing_s)


class ApiClient:
    """Connections to one server, at most `connections` at once. Used within one asyncio loop, as a context manager."""

    def __init__(
        self,
        url: str,
        api_key: str = "",
        *,
        connections: int,
        timeout_s: float,
        attempts: int = 8,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`timeout_s`: of one attempt. `attempts`: of one request.

        Raises: ServerUnreachable for a malformed URL; ConfigError for a malformed key.
        """
        self.url = base_url(_checked(url))
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=authorization(api_key),
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            transport=transport,
            trust_env=False,  # no proxy from the environment: it would get the key
        )

    async def __aenter__(self) -> ApiClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> ApiAnswer:
        """POST a JSON body, again after 429, 502, 503, a proxy's 504 and lost connections, until `attempts` are used up;
        then the last answer is returned. For an hour, a 429 that says when to come back uses none up: where a key's limit lets few
        of many requests in at once, each has its turn.

        Raises: ServerUnreachable if there was no answer, DeadlineExceeded if there was none in time, NotAnApiAnswer if it
        was no JSON object.
        """
        return await self._ask("POST", path, to_json(body))

    async def get(self, path: str) -> ApiAnswer:
        """GET, with the same retries as `post`."""
        return await self._ask("GET", path, None)

    async def _ask(self, method: str, path: str, content: bytes | None) -> ApiAnswer:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        attempt, patient_until_s = 1, time.monotonic() + _LONGEST_ASKED_S
        while True:
            last, counts = attempt == self._attempts, True
            try:
                response = await self._http.request(method, path, content=content, headers=headers)
            except httpx.ReadTimeout:
                raise DeadlineExceeded(f"no answer within {self._timeout_s:g} s") from None
            except httpx.DecodingError as error:
                raise NotAnApiAnswer(f"{self.url}{path} answers what cannot be decompressed: {error}") from None
            except httpx.TransportError as error:
                if last:
                    reason = str(error) or type(error).__name__
                    raise ServerUnreachable(f"{self.url} does not answer: {reason}") from None
                asked: Mapping[str, str] = {}
            else:
                answer, asked, status = _answer(response), response.headers, response.status_code
                says_when = status == HTTPStatus.TOO_MANY_REQUESTS and "retry-after" in asked
                counts = not says_when or time.monotonic() >= patient_until_s
                is_retried = status in _RETRIED or (status == _GATEWAY_TIMEOUT and answer is None)
                if counts and (last or not is_retried):
                    if answer is None:
                        raise _not_an_answer(response)
                    return answer
            await asyncio.sleep(wait_before_retry_s(attempt, asked))
            attempt += counts


async def run_workers(items: Iterable[T], work: Callable[[T], Awaitable[None]], workers: int) -> None:
    """Await `work(item)` for each item, `workers` at once; an item is taken when a worker is free.

    Raises: the first error of `work` or of `items`; the other workers are cancelled.
    """
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _checked(url: str) -> str:
    """Raises: ServerUnreachable for a malformed URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServerUnreachable(f"{url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > HIGHEST_PORT:
        raise ServerUnreachable(f"{url!r} is not an http:// or https:// URL")
    return url


def _answer(response: httpx.Response) -> ApiAnswer | None:
    """None if the body is not a JSON object."""
    try:
        body: Any = from_json(response.content)
    except ValueError:
        return None
    if not isinstance(body, dict):
        return None
    return ApiAnswer(response.status_code, response.headers.get("x-request-id", ""), cast("dict[str, Any]", body))


def _not_an_answer(response: httpx.Response) -> NotAnApiAnswer:
    start = response.content[:_SHOWN_BYTES].decode(errors="replace")
    return NotAnApiAnswer(
        f"{response.url} answers {response.status_code} without a JSON object, is this a server of the OpenAI API? {start}"
    )
