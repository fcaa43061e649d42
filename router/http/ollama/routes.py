"""ollama's calls that generate or embed; the others are in the files beside it. Runs on the router's event loop."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.http.error_shapes import OllamaError
from router.http.json_body import Json
from router.http.ollama.answer_types import OllamaAnswer, OllamaEmbedding, OllamaEmbeddings
from router.http.ollama.model_routes import add_ollama_model_routes
from router.http.ollama.ollama_format import OllamaFormat
from router.http.ollama.requests import EmbedRequest, GenerateRequest, OllamaChatRequest, OllamaEmbeddingsRequest
from router.http.openai.build_request import completion_generation
from router.http.openai.chat_request import ChatRequest
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.parse_body import equivalent_request, validated
from router.http.openapi import generates
from router.http.pooling.format import Pooled, floats
from router.http.pooling.inputs import embedding_work
from router.http.pooling.requests import EmbeddingRequest
from router.http.pooling.serve import serve_pooled
from router.http.responses import JsonResponse
from router.http.serve import admitted_caller, format_options, parse_as, serve, serve_chat
from router.http.services import Services

_LINES = "application/x-ndjson"
_generates = partial(generates, error=OllamaError, stream="")


def add_ollama_embedding_routes(app: FastAPI, services: Services) -> None:
    """Add `/api/embed` and `/api/embeddings` to the application."""

    @app.post("/api/embed", openapi_extra=_generates(OllamaEmbeddings, EmbedRequest))
    async def ollama_embed(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The vector of each input, like ollama's endpoint of the same name."""
        began_s = time.perf_counter()
        body, size = await parse_as(request, services, EmbedRequest, validated, ids="ollama-")
        wanted = validated(body.embedding_request(), EmbeddingRequest)

        def answer(found: Pooled) -> Json:
            return {
                "model": found.model.name,
                "embeddings": map(floats, found.vectors),
                "total_duration": int(1e9 * (time.perf_counter() - began_s)),
                "load_duration": 0,
                "prompt_eval_count": found.work.num_tokens,
            }

        return await serve_pooled(request, services, wanted, size, partial(embedding_work, wanted), answer)

    @app.post("/api/embeddings", openapi_extra=_generates(OllamaEmbedding, OllamaEmbeddingsRequest))
    async def ollama_embeddings(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The vector of a prompt, like ollama's endpoint of the same name; it is not normalized."""
        body, size = await parse_as(request, services, OllamaEmbeddingsRequest, validated, ids="ollama-")
        wanted = validated(body.embedding_request(), EmbeddingRequest)
        work = partial(embedding_work, wanted)
        return await serve_pooled(
            request, services, wanted, size, work, lambda found: {"embedding": floats(found.vectors[0])}
        )


def add_ollama_routes(app: FastAPI, services: Services) -> None:
    """Add all of them to the application."""
    add_ollama_model_routes(app, services)
    add_ollama_embedding_routes(app, services)

    @app.post("/api/chat", openapi_extra=_generates(OllamaAnswer, OllamaChatRequest, stream=_LINES))
    async def ollama_chat(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, like ollama's endpoint of the same name."""
        body, size = await parse_as(request, services, OllamaChatRequest, validated, ids="ollama-")
        if not body.messages:
            return _loaded(services, body, {"message": {"role": "assistant", "content": ""}})
        return await _serve_chat(request, services, body, size, chat=True)

    @app.post("/api/generate", openapi_extra=_generates(OllamaAnswer, GenerateRequest, stream=_LINES))
    async def ollama_generate(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a prompt, like ollama's endpoint of the same name."""
        body, size = await parse_as(request, services, GenerateRequest, validated, ids="ollama-")
        if not body.prompt:
            return _loaded(services, body, {"response": ""})
        if not body.raw:
            return await _serve_chat(request, services, body, size, chat=False)
        raw = equivalent_request(body.completion_request(), CompletionRequest)
        model = services.catalog.model_for(raw.model, "generate")
        caller = admitted_caller(request, services, model, raw.user, raw.priority)
        wanted = await services.body_work.run(
            request, size, lambda: completion_generation(raw, model, raw.prompt[0], caller)
        )
        form = OllamaFormat(format_options(request, services, raw, model), model.tokenizer, [], chat=False)
        return await serve(request, services, model, [wanted], form, stream=bool(raw.stream))


def _loaded(services: Services, body: OllamaChatRequest | GenerateRequest, shown: Json) -> Response:
    """The answer to a client that wants a model to be loaded, which it is."""
    model = services.catalog.model_for(body.model, "generate")
    about = {"model": model.name, "created_at": datetime.now(UTC).isoformat()}
    return JsonResponse({**about, **shown, "done": True, "done_reason": "load"})


async def _serve_chat(
    request: Request, services: Services, body: OllamaChatRequest | GenerateRequest, size: int, *, chat: bool
) -> Response:
    wanted = await services.body_work.run(request, size, lambda: equivalent_request(body.chat_request(), ChatRequest))
    return await serve_chat(request, services, wanted, size, partial(OllamaFormat, chat=chat))
