"""The HTTP application: OpenAI's two completion calls, and how errors are answered. Runs on the router's event loop.

`build` makes the FastAPI application from a `Services`; nothing here knows how services are made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.base.errors import ClientError, KvRelayError, RequestTimeout
from router.fast.yield_turn import yield_turn
from router.http.answer import Answer
from router.http.api_keys import KeyGuard
from router.http.body import read_body
from router.http.format import Format, FormatOptions
from router.http.openai.build_request import caller_of, chat_generation, completion_generation
from router.http.openai.chat_format import ChatFormat
from router.http.openai.chat_request import ChatRequest
from router.http.openai.completion_format import CompletionFormat
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.parse_body import RequestT, parse_body
from router.http.openai.shared_fields import CompletionRequestBase
from router.http.operator_routes import add_operator_routes, version
from router.http.request_headers import header
from router.http.response_headers import RequestIds, headers, printable
from router.http.responses import EventStream, JsonResponse, error_response
from router.http.services import Services
from router.model_catalog import ServedModel
from router.requests.request import GenerationRequest

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_THREAD_BYTES = 16_384
"""Larger bodies are parsed, rendered and tokenized on a thread, so that other streams go on."""
_IDS = "kvrelay.ids"
"""Key of a request's `RequestIds` in its ASGI scope."""


def _schema(model: type[CompletionRequestBase]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def build(services: Services) -> FastAPI:
    """The application."""
    app = FastAPI(title="kvrelay", version=version(), redoc_url=None)
    app.add_middleware(KeyGuard, keys=services.api_keys, count=lambda status: services.metrics.http_error(status))
    _add_error_handlers(app, services)
    add_operator_routes(app, services)

    @app.post("/v1/chat/completions", openapi_extra=_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, like OpenAI's endpoint of the same name."""
        _assign_ids(request, "chatcmpl")
        body, size = await _parse(request, services, ChatRequest)
        model = services.catalog.get(body.model)
        caller = caller_of(request.scope, body, with_keys=bool(services.api_keys))
        services.dispatcher.check_room(1, caller.tenant)
        generation = await _maybe_on_thread(size, lambda: chat_generation(body, model, caller))
        options = _options(request, body, model)
        return await _serve(request, services, body, [generation], ChatFormat(options, model.tokenizer))

    @app.post("/v1/completions", openapi_extra=_schema(CompletionRequest))
    async def completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Continue each prompt, like OpenAI's endpoint of the same name."""
        _assign_ids(request, "cmpl")
        body, size = await _parse(request, services, CompletionRequest)
        model = services.catalog.get(body.model)
        caller = caller_of(request.scope, body, with_keys=bool(services.api_keys))
        services.dispatcher.check_room(len(body.prompt), caller.tenant)
        generations = await _maybe_on_thread(
            size, lambda: [completion_generation(body, model, prompt, caller) for prompt in body.prompt]
        )
        options = _options(request, body, model)
        form = CompletionFormat(options, model.tokenizer, len(generations))
        return await _serve(request, services, body, generations, form)

    return app


def _assign_ids(request: Request, prefix: str) -> None:
    """Set the request's ids before anything can fail: error responses carry them too."""
    request.scope[_IDS] = RequestIds.make(prefix, header(request.scope, b"x-request-id"))


async def _parse(request: Request, services: Services, kind: type[RequestT]) -> tuple[RequestT, int]:
    """The body and its size in bytes; the size bounds all work on it."""
    data = await read_body(request, services.max_body_bytes, services.body_deadlines)
    body = await _maybe_on_thread(len(data), lambda: parse_body(data, kind))
    await yield_turn()
    return body, len(data)


async def _maybe_on_thread(size: int, work: Callable[[], _T]) -> _T:
    """`work()` on the event loop if the body is small, else on a thread."""
    return work() if size <= _THREAD_BYTES else await asyncio.to_thread(work)


def _options(request: Request, body: CompletionRequestBase, model: ServedModel) -> FormatOptions:
    ids: RequestIds = request.scope[_IDS]
    if body.request_id and not ids.client:
        request.scope[_IDS] = ids = RequestIds(ids.own, printable(body.request_id))
    return FormatOptions(
        request_id=ids.own,
        model=model.name,
        with_logprobs=body.num_logprobs is not None,
        with_token_ids=bool(body.return_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
        usage_in_stream=body.usage_in_stream,
        continuous_usage=body.continuous_usage,
    )


async def _serve(
    request: Request,
    services: Services,
    body: CompletionRequestBase,
    wanted: list[GenerationRequest],
    form: Format,
) -> Response:
    """Run the generations and answer, streamed or whole. Errors before the first token keep their HTTP status."""
    await yield_turn()
    answer = Answer()
    ids: RequestIds = request.scope[_IDS]
    handed_over = False
    services.metrics.set_model(form.options.model)
    try:
        answer.generations = services.dispatcher.submit(
            ids.own, wanted, form.tokenizer.pieces, answer.on_news, ids.client
        )
        answer.watch(request.receive)
        if body.stream:
            await answer.begun()
            stream = EventStream(answer, answer.events(form), headers(ids, answer.generations[0]))
            handed_over = True
            return stream
        deltas = await answer.finished()
        if answer.abandoned:
            return Response(status_code=499)
        await yield_turn()
        return JsonResponse(await answer.whole(form, deltas), headers=headers(ids, answer.generations[0]))
    except KvRelayError as error:
        # Handled here, not in the application's handler, because the headers of a failure also name the nodes tried.
        services.metrics.http_error(error.http_status)
        return error_response(error, headers(ids, answer.failed_generation(error)))
    finally:
        if not handed_over:
            answer.close()


def _add_error_handlers(app: FastAPI, services: Services) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            known = ClientError(f"{error.detail}: {request.method} {request.url.path[:200]}")
            known.http_status = error.status_code
            known.code = "not_found" if error.status_code == 404 else "invalid_request"
        elif isinstance(error, KvRelayError):
            known = error
        elif isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        else:
            known = KvRelayError("internal error in the router")
        services.metrics.http_error(known.http_status)
        ids: RequestIds | None = request.scope.get(_IDS)
        shown = [] if ids is None else headers(ids, None)
        if isinstance(error, HTTPException):  # 405 lists the allowed methods
            shown += [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        if isinstance(known, RequestTimeout):
            # The rest of the body would be parsed as the connection's next request.
            shown.append((b"connection", b"close"))
        return error_response(known, shown)

    for kind in (HTTPException, KvRelayError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
