"""The HTTP surface: OpenAI's calls and what operators look at. Runs on the router's event loop.

`build` makes the FastAPI application over a `Services`; nothing here knows how services are made.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.metadata
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.errors import (
    BadRequest,
    ClientError,
    KvRelayError,
    PayloadTooLarge,
    RequestTimeout,
    Unauthorized,
    UnsupportedMediaType,
)
from common.control.messages import EngineRequest
from router.fast.http_connection import CLIENT
from router.fast.yield_turn import yield_turn
from router.http.answer import Answer, EventStream, JsonResponse, error_response
from router.http.openai_format import ChatFormat, Format, FormatOptions, TextFormat
from router.http.openai_types import ChatRequest, CompletionRequest, CompletionRequestBase, RequestT, parse_body
from router.http.response_headers import RequestIds, headers, printable
from router.metrics import Metrics
from router.model_catalog import ModelCatalog, ServedModel
from router.requests.deadlines import Deadlines
from router.requests.dispatch import Dispatcher
from router.requests.generation import GenerationRequest

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_THREAD_BYTES = 16_384
"""Larger bodies are parsed, rendered and tokenized on a thread, so that other streams go on."""
_IDS = "kvrelay.ids"
"""Where a request's scope has its `RequestIds`."""
_MAX_KEY_CHARS = 256
"""Of a session's or tenant's name."""
_DRAIN_BYTES = 64 * 2**20
"""Of a body that is refused, so much is read and thrown away, so that the client gets to read the refusal."""


@dataclass(frozen=True)
class Services:
    """What the routes work with."""

    dispatcher: Dispatcher
    catalog: ModelCatalog
    metrics: Metrics
    degraded: Callable[[], str]
    """Whether Redis is away."""
    max_body_bytes: int
    bodies: Deadlines[asyncio.Task[Any]]
    """What `body_deadlines` makes."""
    api_keys: tuple[str, ...] = ()


def version() -> str:
    """Of the installed distribution."""
    try:
        return importlib.metadata.version("kvrelay")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def _header(scope: Scope, name: bytes) -> str:
    """The value of a header, whose name is in lower case; empty if it is missing."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return ""


def _given_key(scope: Scope) -> str:
    """The API key that a request brings; empty if none. However the header is spelled, a key is one."""
    kind, _, given = _header(scope, b"authorization").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


class KeyGuard:
    """ASGI middleware: with keys configured, everything but `/health` wants one. `count` hears the status of a refusal."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], count: Callable[[int], None]) -> None:
        self._app = app
        self._count = count
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        given = _given_key(scope)
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]  # the bytes that came
        if any(matches):
            await self._app(scope, receive, send)
        else:
            refusal = Unauthorized("a valid API key is needed: send 'Authorization: Bearer KEY'")
            self._count(refusal.http_status)
            await error_response(refusal, [(b"www-authenticate", b"Bearer")])(scope, receive, send)


def body_deadlines(timeout_s: float) -> Deadlines[asyncio.Task[Any]]:
    """For `read_body`: of the tasks that wait for a body."""

    def late(task: asyncio.Task[Any]) -> None:
        task.cancel()

    return Deadlines(timeout_s, late)


async def read_body(request: Request, limit: int, deadlines: Deadlines[asyncio.Task[Any]]) -> bytes:
    """The body of a request that claims to be JSON.

    Raises: UnsupportedMediaType, PayloadTooLarge, RequestTimeout.
    """
    declared = _header(request.scope, b"content-length")
    refused: ClientError | None = _too_large(limit) if declared.isdigit() and int(declared) > limit else None
    if _header(request.scope, b"content-type").partition(";")[0].strip().lower() != "application/json":
        refused = UnsupportedMediaType("the body must be sent with Content-Type: application/json")
    size = 0
    parts: list[bytes] = []
    task = asyncio.current_task()
    assert task is not None
    deadlines.add(task)
    try:
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > limit and refused is None:
                refused = _too_large(limit)
            if refused is None:
                parts.append(part)
            else:
                parts.clear()
                if size > _DRAIN_BYTES:
                    break
    except asyncio.CancelledError:
        if task in deadlines or task.uncancel():
            raise  # by somebody else
        refused = refused or RequestTimeout(f"the body did not arrive within {deadlines.timeout_s:g} s")
    finally:
        deadlines.remove(task)
    if refused is not None:
        raise refused
    return b"".join(parts)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the {limit} bytes that this server accepts")


def _schema(model: type[CompletionRequestBase]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def build(services: Services) -> FastAPI:
    """The application."""
    app = FastAPI(title="kvrelay", version=version(), redoc_url=None)
    app.add_middleware(KeyGuard, keys=services.api_keys, count=lambda status: services.metrics.http_error(status))
    _add_error_handlers(app, services)
    _add_operator_routes(app, services)

    @app.post("/v1/chat/completions", openapi_extra=_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """An answer to a conversation, as OpenAI's call of this name."""
        _name(request, "chatcmpl")
        body, size = await _parse(request, services, ChatRequest)
        model = services.catalog.get(body.model)
        origin = _origin(request, services, body)
        services.dispatcher.check_room(1, origin.tenant)
        generation = await _maybe_on_thread(size, lambda: _chat_generation(body, model, origin))
        options = _options(request, body, model)
        return await _serve(request, services, body, [generation], ChatFormat(options, model.tokenizer), options)

    @app.post("/v1/completions", openapi_extra=_schema(CompletionRequest))
    async def completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """A continuation of each prompt, as OpenAI's call of this name."""
        _name(request, "cmpl")
        body, size = await _parse(request, services, CompletionRequest)
        model = services.catalog.get(body.model)
        origin = _origin(request, services, body)
        services.dispatcher.check_room(len(body.prompt), origin.tenant)
        generations = await _maybe_on_thread(
            size, lambda: [_text_generation(body, model, prompt, origin) for prompt in body.prompt]
        )
        options = _options(request, body, model)
        form = TextFormat(options, model.tokenizer, len(generations))
        return await _serve(request, services, body, generations, form, options)

    return app


def _name(request: Request, prefix: str) -> None:
    """Give the request its id, before anything can fail: errors carry it too."""
    request.scope[_IDS] = RequestIds.make(prefix, _header(request.scope, b"x-request-id"))


async def _parse(request: Request, services: Services, kind: type[RequestT]) -> tuple[RequestT, int]:
    """The body, and its size in bytes, which bounds all work on it."""
    data = await read_body(request, services.max_body_bytes, services.bodies)
    body = await _maybe_on_thread(len(data), lambda: parse_body(data, kind))
    await yield_turn()
    return body, len(data)


async def _maybe_on_thread(size: int, work: Callable[[], _T]) -> _T:
    """`work()`, where it does not keep the loop: here for a small body, else on a thread."""
    return work() if size <= _THREAD_BYTES else await asyncio.to_thread(work)


def _chat_generation(body: ChatRequest, model: ServedModel, origin: _Origin) -> GenerationRequest:
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    text = model.tokenizer.render_chat(
        messages, add_generation_prompt=body.add_generation_prompt is not False, kwargs=body.chat_template_kwargs
    )
    prompt_ids = _encode(model, text, "messages", add_special_tokens=False)
    return _generation_request(body, model, prompt_ids, "messages", origin)


def _text_generation(
    body: CompletionRequest, model: ServedModel, prompt: str | list[int], origin: _Origin
) -> GenerationRequest:
    if isinstance(prompt, str):
        prompt = _encode(model, prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)
    return _generation_request(body, model, prompt, "prompt", origin)


def _encode(model: ServedModel, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    at_least = model.tokenizer.min_tokens(text)
    if at_least > model.max_model_len:
        raise _too_long(model, f"at least {at_least}", at_least, 0, param)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _too_long(model: ServedModel, total: str, prompt: int, completion: int, param: str) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {model.max_model_len} tokens. However, you requested {total} tokens "
        f"({prompt} in the {param}, {completion} in the completion). Please reduce the length of the {param} or "
        "completion.",
        param=param,
        code="context_length_exceeded",
    )


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


def _generation_request(
    body: CompletionRequestBase, model: ServedModel, prompt_ids: list[int], param: str, origin: _Origin
) -> GenerationRequest:
    """Fit a prompt into the model's limits.

    Raises: BadRequest when it is empty, too long, or has ids outside the vocabulary.
    """
    if not prompt_ids:
        raise BadRequest("the prompt is empty", param=param)
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < model.vocab_size:
        raise BadRequest(f"token ids must be at least 0 and below {model.vocab_size}", param=param)
    room, wanted = model.max_model_len - len(prompt_ids), body.token_limit
    explicit = body.model_fields_set & {"max_tokens", "max_completion_tokens"}
    if room < 1 or (wanted is not None and explicit and wanted > room):
        asked = wanted if wanted is not None and explicit else 1
        raise _too_long(model, str(len(prompt_ids) + asked), len(prompt_ids), asked, param)
    defaults = model.sampling_defaults
    usual = defaults.max_tokens and max(defaults.max_tokens, body.min_tokens or 0)
    max_tokens = min(wanted or usual or room, room)
    sampling = body.sampling(max_tokens=max_tokens, eos_token_ids=model.eos_token_ids, defaults=defaults)
    beyond = [token_id for token_id in body.stop_token_ids or () if token_id >= model.vocab_size]
    if beyond:
        raise BadRequest(f"token id {beyond[0]} is not below {model.vocab_size}", param="stop_token_ids")
    if any(token_id >= model.vocab_size for token_id, _ in sampling.logit_bias):
        raise BadRequest(f"the token ids must be below {model.vocab_size}", param="logit_bias")
    return GenerationRequest(
        EngineRequest(prompt_ids, sampling, body.cache_salt or "", body.priority or 0),
        stop=tuple(body.stop),
        client_stop_ids=frozenset(body.stop_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        tenant=origin.tenant,
        session=origin.session,
    )


class _Origin(NamedTuple):
    """Whose share a request takes, and what it should meet again."""

    tenant: str
    session: str


def _origin(request: Request, services: Services, body: CompletionRequestBase) -> _Origin:
    """The tenant is the API key, or where there are no keys, the `user`."""
    tenant = user = (body.user or "")[:_MAX_KEY_CHARS]
    if services.api_keys:
        tenant = hashlib.sha256(_given_key(request.scope).encode()).hexdigest()[:12]
    return _Origin(tenant, (_header(request.scope, b"x-session-id") or user)[:_MAX_KEY_CHARS])


async def _serve(
    request: Request,
    services: Services,
    body: CompletionRequestBase,
    wanted: list[GenerationRequest],
    form: Format,
    options: FormatOptions,
) -> Response:
    """Run the generations and answer, streamed or whole. Errors before the first token keep their HTTP status."""
    await yield_turn()
    answer = Answer()
    ids: RequestIds = request.scope[_IDS]
    handed_over = False
    services.metrics.set_model(options.model)
    try:
        answer.generations = services.dispatcher.submit(
            ids.own, wanted, form.tokenizer.pieces, answer.on_news, ids.client
        )
        answer.watch(request.scope[CLIENT])
        if body.stream:
            await answer.begun()
            stream = EventStream(answer, answer.events(form, options), headers(ids, answer.generations[0]))
            handed_over = True
            return stream
        deltas = await answer.finished()
        if answer.abandoned:
            return Response(status_code=499)
        await yield_turn()
        return JsonResponse(await answer.whole(form, deltas), headers=headers(ids, answer.generations[0]))
    except KvRelayError as error:
        # Here and not in the application's handler, so that a failure too says where it was tried.
        services.metrics.http_error(error.http_status)
        return error_response(error, headers(ids, answer.to_blame(error)))
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
        if isinstance(error, HTTPException):  # 405 names the methods that there are
            shown += [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        if isinstance(known, RequestTimeout):
            # What is left of a body that never came would be read as the connection's next request.
            shown.append((b"connection", b"close"))
        return error_response(known, shown)

    for kind in (HTTPException, KvRelayError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)


def _add_operator_routes(app: FastAPI, services: Services) -> None:
    nodes = services.dispatcher.nodes

    @app.get("/v1/models")
    async def models() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The served model."""
        model = services.catalog.model
        data = [] if model is None else [_model_card(model)]
        return JsonResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The served model, by name."""
        return JsonResponse(_model_card(services.catalog.get(name)))

    @app.get("/health")
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        """200 when requests can be served, 503 when not; how well is in the body."""
        prefill, decode = len(nodes.usable("prefill")), len(nodes.usable("decode"))
        ready = decode > 0 and services.catalog.model is not None
        degraded = services.degraded()
        body = {
            "status": ("degraded" if degraded else "ok") if ready else "unavailable",
            "prefill": prefill,
            "decode": decode,
            "prefill_mode": "relayed" if prefill else "local: no prefill node, decode nodes compute prompts themselves",
            "degraded": bool(degraded),
            "redis": degraded or "ok",
        }
        return JsonResponse(body, 200 if ready else 503)

    @app.get("/ping")
    async def ping() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Whether the router's loop runs."""
        return Response(status_code=200)

    @app.get("/version")
    async def show_version() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The router's version."""
        return JsonResponse({"version": version()})

    @app.get("/metrics")
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Prometheus metrics."""
        return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


_STARTED_S = int(time.time())


def _model_card(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "kvrelay",
        "root": model.folder.name,
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
    }
