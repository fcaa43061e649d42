"""What every pooling call does: the body, the parts, the answer. Runs on the router's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from fastapi import Request
from starlette.responses import Response

from common.base.errors import KvRelayError
from common.control.http_connection import listener_of
from router.http.client import count_tokens
from router.http.json_body import Json, large_json
from router.http.openai.build_request import Caller
from router.http.pooling.inputs import embedding_work
from router.http.pooling.requests import EmbeddingRequest, PoolingFields, PoolingRequest
from router.http.response_headers import RawHeaders, RequestIds
from router.http.responses import JsonResponse, error_response
from router.http.serve import caller_from, warnings_of, with_client_id
from router.http.services import Services
from router.models.served_model import ServedModel
from router.pooling.call import PoolCall
from router.pooling.work import PoolWork

_FEW_VALUES = 65_536
"""Answers with more values are made on a thread."""


class EmbeddedInputs(NamedTuple):
    """What an answer of embeddings is made from."""

    ids: RequestIds
    model: ServedModel
    work: PoolWork
    vectors: list[bytes]


async def serve_embeddings(
    request: Request,
    services: Services,
    body: EmbeddingRequest | PoolingRequest,
    size: int,
    answer: Callable[[EmbeddedInputs], Json],
    *,
    per_token: bool = False,
) -> Response:
    """Embed the inputs of a body of `size` bytes, and answer with `answer(...)`."""
    model = services.catalog.model_for(body.model, "embed")
    ids, caller = admitted_caller(request, services, body, model)
    work = await services.body_work.run(request, size, lambda: embedding_work(body, model, caller, per_token=per_token))
    return await serve_pooled(
        request, services, model, work, lambda vectors: answer(EmbeddedInputs(ids, model, work, vectors))
    )


def admitted_caller(
    request: Request, services: Services, body: PoolingFields, model: ServedModel
) -> tuple[RequestIds, Caller]:
    """The request's ids and who sends it. Raises: what `Dispatcher.check_room` raises, before anything is tokenized."""
    caller = caller_from(request, body.user, body.priority)
    services.dispatcher.check_room(model.base, 1, caller.tenant, caller.priority)
    return with_client_id(request, body.request_id), caller


async def serve_pooled(
    request: Request,
    services: Services,
    model: ServedModel,
    work: PoolWork,
    answer: Callable[[list[bytes]], Json],
) -> Response:
    """Compute the vectors of `work`, and answer with `answer(vectors)`."""
    began_s, ids = time.perf_counter(), with_client_id(request, None)
    metrics = services.dispatcher.state(model.base).metrics
    metrics.set_name(model.root)
    call = PoolCall(services.dispatcher, ids.own, ids.client, work)
    count_tokens(request.scope, lambda: call.tried_tokens)
    client = listener_of(request.scope)
    client.watch(call.cancel)
    try:
        vectors = await call.run()
    except KvRelayError as error:
        metrics.failed(error.code)
        services.metrics.http_error(error)
        return error_response(error, request.scope, _headers(request, ids, call))
    finally:
        client.watch(None)
        call.cancel()
    if vectors is None:
        metrics.cancelled()
        return Response(status_code=499)
    metrics.pooled(len(vectors), work.num_tokens, time.perf_counter() - began_s)
    if sum(map(len, vectors)) > 4 * _FEW_VALUES:
        body = await asyncio.to_thread(lambda: large_json(answer(vectors)))
    else:
        body = large_json(answer(vectors))
    return JsonResponse(body, headers=_headers(request, ids, call))


def _headers(request: Request, ids: RequestIds, call: PoolCall) -> RawHeaders:
    shown = {b"x-kvrelay-attempt": call.attempts, b"x-kvrelay-parts": len(call.parts)}
    return [*ids.headers(), *((name, b"%d" % value) for name, value in shown.items()), *warnings_of(request)]
