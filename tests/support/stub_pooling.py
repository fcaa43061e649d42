"""Results of stub nodes for pooling models: vectors that depend on all token ids, computed without a model."""

from __future__ import annotations

import numpy as np

from common.control.messages import Task
from common.control.pooling import PoolInput, PoolRequest


def vector(token_ids: list[int], width: int) -> np.ndarray:
    """float32 [width]"""
    seed = sum((place + 1) * token for place, token in enumerate(token_ids))
    return np.sin(np.arange(1, width + 1) * (seed % 1009 + 1)).astype("<f4")


def pair_score(pair: PoolInput) -> float:
    """Between 0 and 1; larger the more tokens both segments share."""
    first, second = set(pair.token_ids[: pair.second_at]), set(pair.token_ids[pair.second_at :])
    return len(first & second) / max(1, len(first | second))


def pooled(request: PoolRequest, task: Task, width: int) -> list[bytes]:
    """The vectors of a request, as `PoolResult` carries them."""
    if task == "score":
        return [np.array([pair_score(each)], "<f4").tobytes() for each in request.inputs]
    found: list[bytes] = []
    for each in request.inputs:
        ids = [[token] for token in each.token_ids] if request.per_token else [each.token_ids]
        rows = np.stack([vector(row, width) for row in ids])[:, : request.dimensions or width]
        if request.normalize:
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        found.append(rows.astype("<f4").tobytes())
    return found
