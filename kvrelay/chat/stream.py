"""Streamed chat answers of a server of the OpenAI API, one blocking request at a time."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import httpx
from pydantic_core import from_json

from common.base.errors import KvRelayError
from kvrelay.served_models import authorization, base_url

_CONNECT_S = 10.0


class ChatFailed(KvRelayError):
    """The server refused the conversation, or the answer broke off."""


class TextPiece(NamedTuple):
    """New text of an answer."""

    text: str
    reasoning: str = ""


class ChatClient:
    """Sends conversations to one server. A context manager."""

    def __init__(
        self, url: str, api_key: str, *, timeout_s: float, transport: httpx.BaseTransport | None = None
    ) -> None:
        """`timeout_s`: of the wait for the next token. Raises: ConfigError for a malformed key."""
        self._url = base_url(url)
        self._http = httpx.Client(
            headers=authorization(api_key),
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            transport=transport,
            trust_env=False,
        )

    def stream(self, body: Mapping[str, Any]) -> Generator[TextPiece]:
        """The answer in pieces. Closing the generator ends the request at the server.

        Raises: ChatFailed.
        """
        whole = {**body, "stream": True}
        try:
            with self._http.stream("POST", f"{self._url}/v1/chat/completions", json=whole) as response:
                if response.status_code != 200:
                    raise ChatFailed(_refusal(response.status_code, response.read()))
                for line in _lines(response):
                    if line == b"data: [DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield from _pieces(line[5:])
        except httpx.RequestError as error:
            raise ChatFailed(f"{self._url}: {str(error) or type(error).__name__}") from None
        raise ChatFailed("the answer broke off")

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _lines(response: httpx.Response) -> Generator[bytes]:
    """The lines of a body. httpx would also split a line at characters such as U+2028, within an answer."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    yield rest


def _pieces(data: bytes) -> Generator[TextPiece]:
    try:
        event: Any = from_json(data)
        if "error" in event:
            raise ChatFailed(str(event["error"]["message"]))
        for choice in event["choices"]:
            delta = choice["delta"]
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            piece = TextPiece(delta.get("content") or "", reasoning)
            if piece != ("", ""):
                yield piece
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ChatFailed(f"not an event of a chat completion: {data[:200].decode(errors='replace')}") from None


def _refusal(status: int, body: bytes) -> str:
    try:
        return str(from_json(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {status}: is this a server of the OpenAI API?"
