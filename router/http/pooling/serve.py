"""What every pooling call does: the body, the parts, the answer. Runs on the router's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from fastapi import Request
from starlette.responses import Response

from common.base.errors import KvRelayError
from common.control.http_connection import listener_of
from common.control.messages import Task
from router.http.client import count_tokens
from router.http.json_body import Json, large_json
from router.http.openai.build_request import Caller
from router.http.pooling.format import Pooled
from router.http.pooling.requests import PoolingFields
from router.http.response_headers import RawHeaders, RequestIds
from router.http.responses import JsonResponse, error_response
from router.http.serve import admitted_caller, warnings_of, with_client_id
from router.http.services import Services
from router.models.served_model import ServedModel
from router.pooling.call import PoolCall
from router.pooling.work import PoolWork

_FEW_VALUES = 65_536
"""Answers with more values are made on a thread."""


async def serve_pooled(
    request: Request,
    services: Services,
    body: PoolingFields,
    size: int,
    make_work: Callable[[ServedModel, Caller], PoolWork],
    answer: Callable[[Pooled], Json],
    *,
    tasks: Sequence[Task] = ("embed",),
) -> Response:
    """Compute the vectors that a body of `size` bytes asks for, and answer with `answer(...)`.

    `tasks`: those of the models that can do it.
    """
    model = services.catalog.model_for(body.model, *tasks)
    caller = admitted_caller(request, services, model, body.user, body.priority)
    ids = with_client_id(request, body.request_id)
    work = await services.body_work.run(request, size, lambda: make_work(model, caller))
    began_s = time.perf_counter()
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
    found = Pooled(ids, model, work, vectors)
    if sum(map(len, vectors)) > 4 * _FEW_VALUES:
        shown = await asyncio.to_thread(lambda: large_json(answer(found)))
    else:
        shown = large_json(answer(found))
    return JsonResponse(shown, headers=_headers(request, ids, call))


def _headers(request: Request, ids: RequestIds, call: PoolCall) -> RawHeaders:
    shown = {b"x-kvrelay-attempt": call.attempts, b"x-kvrelay-parts": len(call.parts)}
    return [*ids.headers(), *((name, b"%d" % value) for name, value in shown.items()), *warnings_of(request)]
