"""From vectors to the bodies of answers. Pure; large ones are made on a thread."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from router.http.json_body import Json
from router.http.pooling.inputs import pairs_of
from router.http.pooling.requests import RerankRequest, ScoreRequest
from router.http.response_headers import RequestIds
from router.models.served_model import ServedModel
from router.pooling.work import PoolWork

_FLOAT32 = np.dtype("<f4")


class Pooled(NamedTuple):
    """What an answer is made from."""

    ids: RequestIds
    model: ServedModel
    work: PoolWork
    vectors: list[bytes]


def listed(found: Pooled, data: Iterator[Json] | list[Json]) -> Json:
    """An answer in OpenAI's shape."""
    return {
        "id": found.ids.own,
        "object": "list",
        "created": int(time.time()),
        "model": found.model.name,
        "usage": usage(found.work),
        "data": data,
    }


def usage(work: PoolWork) -> Json:
    return {"prompt_tokens": work.num_tokens, "total_tokens": work.num_tokens}


def floats(vector: bytes) -> list[float]:
    """The values of one vector."""
    return np.frombuffer(vector, _FLOAT32).tolist()


def token_vectors(vectors: bytes, width: int) -> list[list[float]]:
    """The values of one vector per token."""
    return np.frombuffer(vectors, _FLOAT32).reshape(-1, width).tolist()


def shown_vectors(
    vectors: Sequence[bytes], kind: str, field: str, *, as_base64: bool, per_token_width: int = 0
) -> Iterator[Json]:
    """The `data` of an answer: objects of this `kind` with the vector in `field`. `per_token_width`: values of one token.

    They are made one at a time, since a value is ten times as large as a Python object as in a vector.
    """

    def shown(vector: bytes) -> object:
        if as_base64:
            return base64.b64encode(vector).decode()
        return token_vectors(vector, per_token_width) if per_token_width else floats(vector)

    return ({"object": kind, "index": index, field: shown(vector)} for index, vector in enumerate(vectors))


def scores(body: ScoreRequest | RerankRequest, model: ServedModel, vectors: Sequence[bytes]) -> list[float]:
    """The score of each pair of a body, from the vectors of its `comparison_work`: what a cross-encoder computed, or the cosine
    of embeddings.
    """
    values = np.frombuffer(b"".join(vectors), _FLOAT32)
    if model.task == "score":
        return values.tolist()
    counts = [len(seconds) for _, seconds in pairs_of(body)]
    rows = values.reshape(len(vectors), -1)
    first, second = np.repeat(rows[: len(counts)], counts, axis=0), rows[len(counts) :]
    return np.einsum("ij,ij->i", first, second).tolist()


def shown_scores(found: Sequence[float]) -> list[Json]:
    """The `data` of an answer of `/v1/score`."""
    return [{"index": index, "object": "score", "score": score} for index, score in enumerate(found)]


def ranking(body: RerankRequest, found: Sequence[float]) -> list[Json]:
    """The best `top_n` documents, best first; equal ones in their order."""
    best = sorted(range(len(found)), key=lambda index: -found[index])[: body.top_n or None]
    results: list[Json] = []
    for index in best:
        result: Json = {"index": index, "relevance_score": found[index]}
        if body.return_documents is not False:
            result["document"] = {"text": body.documents[index]}
        results.append(result)
    return results
