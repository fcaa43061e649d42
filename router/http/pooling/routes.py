"""`/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/pooling`, as OpenAI, Cohere, Jina and vLLM have them.

Runs on the router's event loop; large bodies are tokenized on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from common.base.errors import BadRequest
from router.http.json_body import Json
from router.http.openai.parse_body import validated
from router.http.openapi import OF_GENERATION, described
from router.http.pooling.answer_types import Embeddings, PoolingAnswer, Ranking, Scores
from router.http.pooling.format import head, ranking, scores, shown_scores, shown_vectors, usage
from router.http.pooling.inputs import comparison_work
from router.http.pooling.requests import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from router.http.pooling.serve import EmbeddedInputs, admitted_caller, serve_embeddings, serve_pooled
from router.http.serve import assign_ids, parse_as
from router.http.services import Services

_Endpoint = Callable[[Request], Any]


def add_pooling_routes(app: FastAPI, services: Services) -> None:
    """Add all of them to the application."""
    _add_vector_routes(app, services)
    _add_score_routes(app, services)


def _add_vector_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/embeddings", openapi_extra=_pools(Embeddings, EmbeddingRequest))
    async def embeddings(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The vector of each input, like OpenAI's endpoint of the same name."""
        assign_ids(request, "embd-")
        body, size = await parse_as(request, services, EmbeddingRequest, validated)
        coded = body.encoding_format == "base64"

        def answer(found: EmbeddedInputs) -> Json:
            shown = shown_vectors(found.vectors, "embedding", "embedding", as_base64=coded)
            return {**head(found.ids.own, found.model.name, found.work), "data": shown}

        return await serve_embeddings(request, services, body, size, answer)

    async def pooling(request: Request) -> Response:
        """What the model computes for each input, like vLLM's endpoint of the same name: one vector per token, or with `task`
        a vector per input.
        """
        assign_ids(request, "pool-")
        body, size = await parse_as(request, services, PoolingRequest, validated)
        if body.task in ("classify", "score"):
            raise BadRequest(f"the task {body.task!r} is not one of this call; use /v1/score", param="task")
        coded, per_token = body.encoding_format == "base64", body.task != "embed"

        def answer(found: EmbeddedInputs) -> Json:
            width = found.work.width if per_token else 0
            shown = shown_vectors(found.vectors, "pooling", "data", as_base64=coded, per_token_width=width)
            return {**head(found.ids.own, found.model.name, found.work), "data": shown}

        return await serve_embeddings(request, services, body, size, answer, per_token=per_token)

    _add(app, pooling, ("/pooling", "/v1/pooling"), _pools(PoolingAnswer, PoolingRequest))


def _add_score_routes(app: FastAPI, services: Services) -> None:
    async def rerank(request: Request) -> Response:
        """The documents that fit the query best, like the endpoints of Cohere and Jina."""
        assign_ids(request, "rerank-")
        body, size = await parse_as(request, services, RerankRequest, validated)
        model = services.catalog.model_for(body.model, "score", "embed")
        ids, caller = admitted_caller(request, services, body, model)
        work = await services.body_work.run(request, size, lambda: comparison_work(body, model, caller))

        def answer(vectors: list[bytes]) -> Json:
            results = ranking(body, scores(body, model, vectors))
            return {"id": ids.own, "model": model.name, "results": results, "usage": usage(work)}

        return await serve_pooled(request, services, model, work, answer)

    async def score(request: Request) -> Response:
        """How well pairs of texts fit: by a cross-encoder, or the cosine of their embeddings; like vLLM's endpoint."""
        assign_ids(request, "score-")
        body, size = await parse_as(request, services, ScoreRequest, validated)
        model = services.catalog.model_for(body.model, "score", "embed")
        ids, caller = admitted_caller(request, services, body, model)
        work = await services.body_work.run(request, size, lambda: comparison_work(body, model, caller))

        def answer(vectors: list[bytes]) -> Json:
            return {**head(ids.own, model.name, work), "data": shown_scores(scores(body, model, vectors))}

        return await serve_pooled(request, services, model, work, answer)

    _add(app, rerank, ("/v1/rerank", "/rerank", "/v2/rerank"), _pools(Ranking, RerankRequest))
    _add(app, score, ("/v1/score", "/score"), _pools(Scores, ScoreRequest))


def _pools(answer: Any, body: Any) -> dict[str, Any]:
    return described(answer, body=body, errors=OF_GENERATION)


def _add(app: FastAPI, endpoint: _Endpoint, paths: Sequence[str], about: dict[str, Any]) -> None:
    """The same call at several addresses; the first one is in `/openapi.json`."""
    for path in paths:
        app.post(path, openapi_extra=about, include_in_schema=path == paths[0])(endpoint)
