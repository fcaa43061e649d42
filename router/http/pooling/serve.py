"""What every pooling call does: the body, the parts, the answer. Runs on the router's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from common.base.errors import KvRelayError
from router.http.disconnect import cancel_on_disconnect
from router.http.json_body import to_json
from router.http.response_headers import RawHeaders, RequestIds
from router.http.responses import JsonResponse, error_response
from router.http.serve import warnings_of
from router.http.services import Services
from router.pooling.call import PoolCall
from router.pooling.work import PoolWork

_FEW_VALUES = 65_536
"""Answers with more values are made on a thread."""


async def serve_pooled(
    request: Request,
    services: Services,
    ids: RequestIds,
    model: str,
    work: PoolWork,
    answer: Callable[[list[bytes]], Any],
) -> Response:
    """Compute the vectors of `work`, and answer with `answer(vectors)`. `model`: name in metrics."""
    began_s = time.perf_counter()
    call = PoolCall(services.dispatcher, ids.own, ids.client, work)
    watching = asyncio.create_task(cancel_on_disconnect(request.receive, call.cancel))
    try:
        vectors = await call.run()
    except KvRelayError as error:
        services.metrics.failed(error.code)
        services.metrics.http_error(error.http_status)
        return error_response(error, request.scope, _headers(request, ids, call))
    finally:
        watching.cancel()
        call.cancel()
    if vectors is None:
        services.metrics.cancelled()
        return Response(status_code=499)
    services.metrics.pooled(model, len(vectors), work.num_tokens, time.perf_counter() - began_s)
    if sum(map(len, vectors)) > 4 * _FEW_VALUES:
        body = await asyncio.to_thread(lambda: to_json(answer(vectors)))
    else:
        body = to_json(answer(vectors))
    return JsonResponse(body, headers=_headers(request, ids, call))


def _headers(request: Request, ids: RequestIds, call: PoolCall) -> RawHeaders:
    shown = {b"x-kvrelay-attempt": call.attempts, b"x-kvrelay-parts": len(call.parts)}
    return [*ids.headers(), *((name, b"%d" % value) for name, value in shown.items()), *warnings_of(request)]
