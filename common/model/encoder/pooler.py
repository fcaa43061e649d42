"""From inputs to the vectors that clients get: runs an encoder, pools, cuts and normalizes."""

from __future__ import annotations

from collections.abc import Sequence

from common.control.pooling import PoolInput, PoolRequest
from common.model.encoder.bert import Encoder

_SMALLEST_NORM = 1e-12
"""As in sentence-transformers: a vector of zeros stays one."""


class EncoderPooler:
    """Computes the vectors of requests with an encoder."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def compute(self, batch: Sequence[tuple[PoolRequest, PoolInput]]) -> list[bytes]:
        """The vector of each input, as `PoolResult` carries it, as its request asks for it."""
        hidden, lengths = self._encoder.hidden([each for _, each in batch])
        if self._encoder.config.task == "score":
            return [score.numpy().tobytes() for score in self._encoder.scores(hidden, lengths).split(1)]
        pooled = self._encoder.pool(hidden, lengths)
        tokens = hidden.split(lengths)
        found: list[bytes] = []
        for index, (request, _) in enumerate(batch):
            vectors = tokens[index] if request.per_token else pooled[index]
            if request.dimensions:
                vectors = vectors[..., : request.dimensions]
            if request.normalize:
                vectors = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(_SMALLEST_NORM)
            found.append(vectors.numpy().tobytes())
        return found
