"""`/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/pooling`, as OpenAI, Cohere, Jina and vLLM have them.

Runs on the router's event loop; large bodies are tokenized on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from common.base.errors import BadRequest
from common.control.messages import Task
from router.http.json_body import Json
from router.http.openai.parse_body import validated
from router.http.openapi import generates
from router.http.pooling.answer_types import Embeddings, PoolingAnswer, Ranking, Scores
from router.http.pooling.format import Pooled, listed, ranking, scores, shown_scores, shown_vectors, usage
from router.http.pooling.inputs import comparison_work, embedding_work
from router.http.pooling.requests import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from router.http.pooling.serve import serve_pooled
from router.http.serve import parse_as
from router.http.services import Services

_Endpoint = Callable[[Request], Any]
_COMPARING: Sequence[Task] = ("score", "embed")
"""Tasks of models that can compare texts."""
_pools = partial(generates, stream="")


def add_pooling_routes(app: FastAPI, services: Services) -> None:
    """Add all of them to the application."""
    _add_vector_routes(app, services)
    _add_score_routes(app, services)


def _add_vector_routes(app: FastAPI, services: Services) -> None:
    @app.post("/v1/embeddings", openapi_extra=_pools(Embeddings, EmbeddingRequest))
    async def embeddings(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The vector of each input, like OpenAI's endpoint of the same name."""
        body, size = await parse_as(request, services, EmbeddingRequest, validated, ids="embd-")
        coded = body.encoding_format == "base64"

        def answer(found: Pooled) -> Json:
            return listed(found, shown_vectors(found.vectors, "embedding", "embedding", as_base64=coded))

        return await serve_pooled(request, services, body, size, partial(embedding_work, body), answer)

    async def pooling(request: Request) -> Response:
        """What the model computes for each input, like vLLM's endpoint of the same name: one vector per token, or with `task`
        a vector per input.
        """
        body, size = await parse_as(request, services, PoolingRequest, validated, ids="pool-")
        if body.task in ("classify", "score"):
            raise BadRequest(f"the task {body.task!r} is not one of this call; use /v1/score", param="task")
        coded, per_token = body.encoding_format == "base64", body.task != "embed"

        def answer(found: Pooled) -> Json:
            width = found.work.width if per_token else 0
            return listed(
                found, shown_vectors(found.vectors, "pooling", "data", as_base64=coded, per_token_width=width)
            )

        work = partial(embedding_work, body, per_token=per_token)
        return await serve_pooled(request, services, body, size, work, answer)

    _add(app, pooling, ("/pooling", "/v1/pooling"), _pools(PoolingAnswer, PoolingRequest))


def _add_score_routes(app: FastAPI, services: Services) -> None:
    async def rerank(request: Request) -> Response:
        """The documents that fit the query best, like the endpoints of Cohere and Jina."""
        body, size = await parse_as(request, services, RerankRequest, validated, ids="rerank-")

        def answer(found: Pooled) -> Json:
            results = ranking(body, scores(body, found.model, found.vectors))
            return {"id": found.ids.own, "model": found.model.name, "results": results, "usage": usage(found.work)}

        work = partial(comparison_work, body)
        return await serve_pooled(request, services, body, size, work, answer, tasks=_COMPARING)

    async def score(request: Request) -> Response:
        """How well pairs of texts fit: by a cross-encoder, or the cosine of their embeddings; like vLLM's endpoint."""
        body, size = await parse_as(request, services, ScoreRequest, validated, ids="score-")

        def answer(found: Pooled) -> Json:
            return listed(found, shown_scores(scores(body, found.model, found.vectors)))

        work = partial(comparison_work, body)
        return await serve_pooled(request, services, body, size, work, answer, tasks=_COMPARING)

    _add(app, rerank, ("/v1/rerank", "/rerank", "/v2/rerank"), _pools(Ranking, RerankRequest))
    _add(app, score, ("/v1/score", "/score"), _pools(Scores, ScoreRequest))


def _add(app: FastAPI, endpoint: _Endpoint, paths: Sequence[str], about: dict[str, Any]) -> None:
    """The same call at several addresses; the first one is in `/openapi.json`."""
    for path in paths:
        app.post(path, openapi_extra=about, include_in_schema=path == paths[0])(endpoint)
