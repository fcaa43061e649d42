"""The HTTP application: all routes, and how errors are answered. Runs on the router's event loop.

`build` makes the FastAPI application from a `Services`; nothing here knows how services are made.
"""

from __future__ import annotations

from functools import cache
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from common.base.errors import BadRequest, ClientError, KvRelayError, RequestTimeout
from router.http.adapter_routes import add_adapter_routes
from router.http.answer_types import ChatCompletion, Completion
from router.http.anthropic.routes import add_anthropic_routes
from router.http.api_keys import OPEN_PATHS, KeyGuard
from router.http.ollama.routes import add_ollama_routes
from router.http.openai.build_request import completion_generation
from router.http.openai.chat_format import ChatFormat
from router.http.openai.chat_request import ChatRequest
from router.http.openai.completion_format import CompletionFormat
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.parse_body import completion_request
from router.http.openapi import document, generates
from router.http.operator_routes import add_operator_routes, version
from router.http.pooling.routes import add_pooling_routes
from router.http.response_headers import headers
from router.http.responses import error_response
from router.http.responses_api.routes import add_responses_routes
from router.http.serve import admitted_caller, format_options, ids_of, parse_as, serve, serve_chat
from router.http.services import Services
from router.http.tokenize_routes import add_tokenize_routes


def build(services: Services) -> FastAPI:
    """The application."""
    app = FastAPI(title="kvrelay", version=version(), docs_url=None, redoc_url=None)
    app.add_middleware(KeyGuard, keys=services.api_keys, count=services.metrics.http_error)
    _add_error_handlers(app, services)
    add_operator_routes(app, services)
    add_tokenize_routes(app, services)
    add_anthropic_routes(app, services)
    add_responses_routes(app, services)
    add_ollama_routes(app, services)
    add_pooling_routes(app, services)
    add_adapter_routes(app, services)
    _add_completion_routes(app, services)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            route.methods = {"GET", "HEAD"}
    _redirect_by_path(app)
    app.openapi = cache(lambda: document(app, with_keys=bool(services.api_keys), open_paths=OPEN_PATHS))
    return app


def _redirect_by_path(app: FastAPI) -> None:
    """A path with a slash too many or too few is redirected to the other one without naming the scheme and host, which the
    framework does: behind a proxy that ends TLS they are not the client's."""
    not_found, app.router.redirect_slashes = app.router.default, False

    async def other_path(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        known = scope["type"] == "http" and path != "/" and not path.startswith("//")
        if known and any(route.matches({**scope, "path": other})[0] is not Match.NONE for route in app.routes):
            query = scope["query_string"].decode("latin-1")
            await RedirectResponse(quote(other) + (f"?{query}" if query else ""))(scope, receive, send)
        else:
            await not_found(scope, receive, send)

    app.router.default = other_path


def _add_completion_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/chat/completions", openapi_extra=generates(ChatCompletion, ChatRequest))
    async def chat_completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, like OpenAI's endpoint of the same name."""
        body, size = await parse_as(request, services, ChatRequest, completion_request, ids="chatcmpl-")
        return await serve_chat(request, services, body, size, ChatFormat)

    @app.post("/v1/completions", openapi_extra=generates(Completion, CompletionRequest))
    async def completions(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Continue each prompt, like OpenAI's endpoint of the same name."""
        body, size = await parse_as(request, services, CompletionRequest, completion_request, ids="cmpl-")
        model, most = services.catalog.model_for(body.model, "generate"), services.dispatcher.config.max_waiting
        if len(body.prompt) > most:
            raise BadRequest(f"at most {most} prompts in one request are allowed", param="prompt")
        count = len(body.prompt) * body.num_samples
        caller = admitted_caller(request, services, model, body.user, body.priority, count)
        generations = await services.body_work.run(
            request,
            size,
            lambda: [completion_generation(body, model, prompt, caller) for prompt in body.prompt],
            on_thread=body.has_grammar_text,
        )
        options = format_options(request, services, body, model)
        form = CompletionFormat(options, model.tokenizer, len(generations) * (body.n or 1))
        return await serve(request, services, model, generations, form, stream=bool(body.stream))


def _allowed(app: FastAPI, path: str) -> str:
    """The methods of all routes with this path, for the header `Allow`."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path_regex.match(path)]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def _add_error_handlers(app: FastAPI, services: Services) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            known = ClientError(f"{error.detail}: {request.method} {request.url.path[:200]}")
            known.http_status = error.status_code
            known.code = "not_found" if error.status_code == 404 else "invalid_request"
            if error.status_code == 405:  # the framework names the methods of the path's first route only
                error.headers = {"allow": _allowed(app, request.url.path)}
        elif isinstance(error, KvRelayError):
            known = error
        elif isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        else:
            known = KvRelayError("internal error in the router")
        services.metrics.http_error(known)
        ids = ids_of(request)
        shown = [] if ids is None else headers(ids, None)
        if isinstance(error, HTTPException):  # 405 lists the allowed methods
            shown += [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        if isinstance(known, RequestTimeout):  # the rest of the body would be parsed as the wrong thing
            shown.append((b"connection", b"close"))
        return error_response(known, request.scope, shown)

    for kind in (HTTPException, KvRelayError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
