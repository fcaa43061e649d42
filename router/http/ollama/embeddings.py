"""ollama's `/api/embed` and `/api/embeddings`. Runs on the router's event loop."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.http.error_shapes import OllamaError
from router.http.json_body import Json
from router.http.ollama.answer_types import OllamaEmbedding, OllamaEmbeddings
from router.http.ollama.requests import EmbedRequest, OllamaEmbeddingsRequest
from router.http.openai.parse_body import validated
from router.http.openapi import OF_GENERATION, described
from router.http.pooling.format import floats
from router.http.pooling.requests import EmbeddingRequest
from router.http.pooling.serve import EmbeddedInputs, serve_embeddings
from router.http.serve import assign_ids, parse_as
from router.http.services import Services


def add_ollama_embedding_routes(app: FastAPI, services: Services) -> None:
    """Add both to the application."""

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
