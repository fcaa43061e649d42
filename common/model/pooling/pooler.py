"""From inputs to the vectors that clients get: runs a model, pools, cuts and normalizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.control.pooling import PoolInput, PoolRequest
from common.model.pooling.decoder_config import PoolingDecoderConfig
from common.model.pooling.encoder_config import EncoderConfig
from common.model.pooling.sentence_transformers import Pooling


def pool(mode: Pooling, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """One vector for each input, [inputs, hidden], from the hidden states of all tokens, [tokens, hidden]."""
    if mode == "cls":
        return hidden[starts(lengths)]
    if mode == "lasttoken":
        return hidden[torch.tensor(lengths).cumsum(0) - 1]
    parts = hidden.split(list(lengths))
    return torch.stack([part.mean(0) if mode == "mean" else part.amax(0) for part in parts])


def starts(lengths: Sequence[int]) -> Tensor:
    """Row of the first token of each input."""
    return torch.tensor([0, *lengths[:-1]]).cumsum(0)


def same_length(lengths: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Rows of the tokens of the inputs of each length."""
    rows: defaultdict[int, list[int]] = defaultdict(list)
    begin = 0
    for length in lengths:
        rows[length].extend(range(begin, begin + length))
        begin += length
    return [(torch.tensor(each), length) for length, each in rows.items()]


_SMALLEST_NORM = 1e-12
"""As in sentence-transformers: a vector of zeros stays one."""


class PoolingModel(Protocol):
    """Computes hidden states, and keeps no KV."""

    @property
    def config(self) -> EncoderConfig | PoolingDecoderConfig: ...

    def hidden(self, inputs: Sequence[PoolInput]) -> tuple[Tensor, list[int]]:
        """The last hidden states of all tokens, [tokens, hidden] float32, and the number of tokens of each input."""
        ...

    def scores(self, hidden: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The scores of pairs, [inputs], from their hidden states: before the model's activation function, and after it. Only of
        models whose task that is."""
        ...


class Pooler:
    """Computes the vectors of requests with a model."""

    def __init__(self, model: PoolingModel) -> None:
        self._model = model

    @torch.inference_mode()
    def compute(self, batch: Sequence[tuple[PoolRequest, PoolInput]]) -> list[bytes]:
        """The vector of each input, as `PoolResult` carries it, as its request asks for it."""
        hidden, lengths = self._model.hidden([each for _, each in batch])
        if self._model.config.task == "score":
            scores, activated = self._model.scores(hidden, lengths)
            chosen = (activated if request.normalize else scores for request, _ in batch)
            return [each[index : index + 1].numpy().tobytes() for index, each in enumerate(chosen)]
        pooled = pool(self._model.config.pooling, hidden, lengths)
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
