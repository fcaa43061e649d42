"""ollama's calls that generate or embed; the others are in the files beside it. Runs on the router's event loop."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

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
from router.http.openai.parse_body import as_far_as_there_is_room, completion_request, validated
from router.http.openapi import OF_GENERATION, described
from router.http.pooling.format import floats
from router.http.pooling.requests import EmbeddingRequest
from router.http.pooling.serve import EmbeddedInputs, serve_embeddings
from router.http.responses import JsonResponse
from router.http.serve import assign_ids, caller_from, format_options, parse_as, prepare_chat, serve
from router.http.services import Services


def add_ollama_embedding_routes(app: FastAPI, services: Services) -> None:
    """Add `/api/embed` and `/api/embeddings` to the application."""

    @app.post(
        "/api/embed",
        openapi_extra=described(OllamaEmbeddings, body=EmbedRequest, errors=OF_GENERATION, error=OllamaError),
    )
    async def ollama_embed(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The vector of each input, like ollama's endpoint of the same name."""
        assign_ids(request, "ollama-")
        began_s = time.perf_counter()
        body, size = await parse_as(request, services, EmbedRequest, validated)
        wanted = validated(body.embedding_request(), EmbeddingRequest)

        def answer(found: EmbeddedInputs) -> Json:
            return {
                "model": found.model.name,
                "embeddings": map(floats, found.vectors),
                "total_duration": int(1e9 * (time.perf_counter() - began_s)),
                "load_duration": 0,
                "prompt_eval_count": found.work.num_tokens,
            }

        return await serve_embeddings(request, services, wanted, size, answer)

    @app.post(
        "/api/embeddings",
        openapi_extra=described(OllamaEmbedding, body=OllamaEmbeddingsRequest, errors=OF_GENERATION, error=OllamaError),
    )
    async def ollama_embeddings(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The vector of a prompt, like ollama's endpoint of the same name; it is not normalized."""
        assign_ids(request, "ollama-")
        body, size = await parse_as(request, services, OllamaEmbeddingsRequest, validated)
        wanted = validated(body.embedding_request(), EmbeddingRequest)
        return await serve_embeddings(
            request, services, wanted, size, lambda found: {"embedding": floats(found.vectors[0])}
        )


_LINES = "application/x-ndjson"


def add_ollama_routes(app: FastAPI, services: Services) -> None:
    """Add all of them to the application."""
    add_ollama_model_routes(app, services)
    add_ollama_embedding_routes(app, services)

    @app.post("/api/chat", openapi_extra=_generates(OllamaChatRequest))
    async def ollama_chat(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, like ollama's endpoint of the same name."""
        assign_ids(request, "ollama-")
        body, size = await parse_as(request, services, OllamaChatRequest, validated)
        if not body.messages:
            return _loaded(services, body, {"message": {"role": "assistant", "content": ""}})
        return await _serve_chat(request, services, body, size, chat=True)

    @app.post("/api/generate", openapi_extra=_generates(GenerateRequest))
    async def ollama_generate(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a prompt, like ollama's endpoint of the same name."""
        assign_ids(request, "ollama-")
        body, size = await parse_as(request, services, GenerateRequest, validated)
        if not body.prompt:
            return _loaded(services, body, {"response": ""})
        if not body.raw:
            return await _serve_chat(request, services, body, size, chat=False)
        raw = as_far_as_there_is_room(completion_request(body.completion_request(), CompletionRequest))
        model = services.catalog.model_for(raw.model, "generate")
        caller = caller_from(request, raw.user, raw.priority)
        services.dispatcher.check_room(model.base, 1, caller.tenant, caller.priority)
        wanted = await services.body_work.run(
            request, size, lambda: completion_generation(raw, model, raw.prompt[0], caller)
        )
        form = OllamaFormat(format_options(request, services, raw, model), model.tokenizer, [], chat=False)
        return await serve(request, services, model, [wanted], form, stream=bool(raw.stream))


def _generates(body: Any) -> dict[str, Any]:
    return described(OllamaAnswer, body=body, errors=OF_GENERATION, error=OllamaError, stream=_LINES)


def _loaded(services: Services, body: OllamaChatRequest | GenerateRequest, shown: Json) -> Response:
    """The answer to a client that wants a model to be loaded, which it is."""
    model = services.catalog.model_for(body.model, "generate")
    return JsonResponse(
        {
            "model": model.name,
            "created_at": datetime.now(UTC).isoformat(),
            **shown,
            "done": True,
            "done_reason": "load",
        }
    )


async def _serve_chat(
    request: Request, services: Services, body: OllamaChatRequest | GenerateRequest, size: int, *, chat: bool
) -> Response:
    wanted = await services.body_work.run(request, size, lambda: completion_request(body.chat_request(), ChatRequest))
    as_far_as_there_is_room(wanted)
    prepared = await prepare_chat(request, services, wanted, size)
    options = format_options(request, services, wanted, prepared.model)
    form = OllamaFormat(options, prepared.model.tokenizer, prepared.parsers(), chat=chat)
    return await serve(
        request, services, prepared.model, [prepared.generation.request], form, stream=bool(wanted.stream)
    )
