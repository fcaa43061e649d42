"""A pooling model in this process: inputs are checked and tokenized by the HTTP API's own code, and computed at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from common.base.errors import BadRequest, KvRelayError
from common.base.process import prepare_compute
from common.config.service_configs import DecodeConfig
from common.control.messages import AttemptKey, ModelInfo
from common.control.pooling import PoolRequest
from common.model.fingerprint import tokenizer_digest
from common.model.hub import model_name
from common.model.pooling.open import load_pooling_model, read_pooling_config
from common.model.tokenizer_folder import tokenizer_folder
from kvrelay.offline.engine import CLOSED
from kvrelay.offline.prompts import Prompt, as_list, checked_text, prompt_value
from router.http.openai.build_request import Caller
from router.http.openai.checks import FieldsError
from router.http.openai.parse_body import validated
from router.http.pooling.format import scores
from router.http.pooling.inputs import comparison_work, embedding_work
from router.http.pooling.requests import MAX_INPUTS, EmbeddingRequest, PoolingFields, ScoreRequest, check_lengths
from router.models.served_model import LoadOptions, load_pooling
from router.pooling.work import PoolWork, split

_BodyT = TypeVar("_BodyT", bound=PoolingFields)


class PoolingEngine:
    """Tokenizer and model of a pooling model, in this process."""

    def __init__(self, config: DecodeConfig, path: Path, options: LoadOptions) -> None:
        """Load the model in folder `path`. Raises: ConfigError in one sentence for what cannot start."""
        of_model = read_pooling_config(path, config.max_model_len)
        info = ModelInfo(
            model_name(path),
            str(path),
            of_model.vocab_size,
            of_model.max_model_len,
            tokenizer_digest(tokenizer_folder(path, options.tokenizer)),
            of_model.task,
        )
        served = load_pooling(info, options)
        self.model = replace(served, task=of_model.task, base=info.name, hidden_size=of_model.hidden_size)
        self._is_closed = False
        prepare_compute(config.threads, config.nice)
        from common.model.pooling.pooler import Pooler

        self._pooler = Pooler(load_pooling_model(path, of_model, config))

    def vectors(
        self, prompts: Prompt | Sequence[Prompt], options: Mapping[str, Any], *, per_token: bool
    ) -> Iterator[tuple[list[int], bytes, int]]:
        """Token ids, vectors and their width, for each prompt. All prompts are checked before any is computed.

        `options`: further fields of `/v1/embeddings`. Raises: BadRequest.
        """
        works = [
            embedding_work(
                _body({"input": part, **options}, EmbeddingRequest),
                self.model,
                Caller(),
                per_token=per_token,
                first=number,
            )
            for number, part in _parts(prompts)
        ]
        if works:
            work = replace(works[0], inputs=[each for work in works for each in work.inputs])
            for each, vector in zip(work.inputs, self._pool(work), strict=True):
                yield each.token_ids.tolist(), vector, work.width

    def scores(self, text_1: str | list[str], text_2: str | list[str], options: Mapping[str, Any]) -> list[float]:
        """The score of each pair. `options`: further fields of `/v1/score`. Raises: BadRequest."""
        first, second = _texts(text_1, "text_1"), _texts(text_2, "text_2")
        try:
            check_lengths(len(first), len(second))
        except FieldsError as error:
            raise BadRequest(str(error), param=error.param) from None
        work: list[tuple[ScoreRequest, PoolWork]] = []
        for at in range(0, max(1, len(second)), MAX_INPUTS):
            part = slice(at, at + MAX_INPUTS)
            number, texts = (0, first) if len(first) == 1 else (at, first[part])
            body = _body({"text_1": texts, "text_2": second[part], **options}, ScoreRequest)
            work.append((body, comparison_work(body, self.model, Caller(), first=(number, at))))
        return [score for body, each in work for score in scores(body, self.model, list(self._pool(each)))]

    def _pool(self, work: PoolWork) -> Iterator[bytes]:
        request = PoolRequest(AttemptKey("offline", 1), [], work.normalize, work.dimensions, work.per_token)
        for part in split(work, 1):
            if self._is_closed:
                raise KvRelayError(CLOSED)
            yield from self._pooler.compute([(request, work.inputs[place]) for place in part])

    def close(self) -> None:
        """End the call that runs on another thread after its current part."""
        self._is_closed = True


def _parts(prompts: Prompt | Sequence[Prompt]) -> Iterator[tuple[int, list[Any]]]:
    """Consecutive inputs of one kind, texts or token ids, each part with the number of its first.

    Raises: BadRequest that names the first wrong one.
    """
    values: list[Any] = []
    for index, prompt in enumerate(as_list(prompts)):
        try:
            values.append(prompt_value(prompt))
        except BadRequest as error:
            raise BadRequest(f"input {index}: {error.message}", param="input") from None
        if values[-1] == []:
            raise BadRequest(f"input {index} is empty", param="input")
    at = 0
    for _, same_kind in groupby(values, type):
        run = list(same_kind)
        for begin in range(0, len(run), MAX_INPUTS):
            yield at + begin, run[begin : begin + MAX_INPUTS]
        at += len(run)


def _texts(value: str | list[str], param: str) -> list[str]:
    """Raises: BadRequest for what are no texts."""
    texts: list[Any] = [value] if isinstance(value, str) else as_list(value)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadRequest(f"{param}.{index}: must be a text, not {type(text).__name__}", param=param)
        try:
            checked_text(text)
        except BadRequest as error:
            raise BadRequest(f"{param}.{index}: {error.message}", param=param) from None
    return texts


def _body(fields: Mapping[str, Any], kind: type[_BodyT]) -> _BodyT:
    return validated({name: value for name, value in fields.items() if value is not None}, kind)
