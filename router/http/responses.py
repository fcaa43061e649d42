"""HTTP responses: a stream of events, JSON, errors. Router process, event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.base.errors import KvRelayError
from router.http.answer import Answer
from router.http.error_shapes import MESSAGES_PATH, shaped_error
from router.http.json_body import to_json
from router.http.own_names import by_own_name
from router.http.request_headers import header
from router.http.response_headers import OF_MESSAGES, OF_REFUSALS, RawHeaders, RequestIds
from router.http.turns import yield_turn


class EventStream(Response):
    """A streamed response that owns its answer: however it ends, the answer is closed."""

    def __init__(
        self, answer: Answer, body: AsyncIterator[tuple[bytes, bool]], media_type: bytes, headers: RawHeaders
    ) -> None:
        self.status_code = 200
        self.raw_headers = [(b"cache-control", b"no-cache"), (b"content-type", media_type), *headers]
        self.background = None
        self._answer = answer
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await yield_turn()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data, more in self._body:
                await send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._answer.close()


class JsonResponse(Response):
    """A JSON body; `bytes` are sent as they are."""

    def __init__(self, content: object, status_code: int = 200, headers: RawHeaders | None = None) -> None:
        self.body = content if isinstance(content, bytes) else to_json(content)
        self.status_code = status_code
        self.background = None
        length = b"%d" % len(self.body)
        self.raw_headers = [(b"content-length", length), (b"content-type", b"application/json"), *(headers or ())]


def error_response(error: KvRelayError, scope: Scope, headers: RawHeaders | None) -> JsonResponse:
    """An error with its status, in the shape and by the names of the API that the path belongs to."""
    error = by_own_name(error, scope)
    extra = list(headers or [])
    if all(name != b"x-request-id" for name, _ in extra):  # refused before its call was known
        prefix = OF_MESSAGES if scope["path"].startswith(MESSAGES_PATH) else OF_REFUSALS
        extra += RequestIds.make(prefix, header(scope, b"x-request-id")).headers()
    retry_after = getattr(error, "retry_after_s", 1.0 if error.http_status == 503 else None)
    if retry_after is not None:
        extra.append((b"retry-after", b"%d" % max(1, round(retry_after))))
    return JsonResponse(shaped_error(scope["path"], error), error.http_status, extra)
