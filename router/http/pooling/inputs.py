"""From the bodies of pooling calls to what nodes compute: tokenizes, and checks against the model's limits.

Pure; runs on the router's event loop, or on a thread for large bodies.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.base.errors import BadRequest
from common.control.identities import pack_ids
from common.control.pooling import PoolInput
from router.http.openai.build_request import Caller
from router.http.pooling.requests import EmbeddingRequest, PoolingFields, PoolingRequest, RerankRequest, ScoreRequest
from router.models.served_model import ServedModel
from router.pooling.work import MAX_PART_RESULT_BYTES, PoolWork
from router.text.tokenizer import WHOLE, Part

_MAX_RESULT_BYTES = 256 * 2**20
"""Bytes of all vectors of one call."""


def embedding_work(
    body: EmbeddingRequest | PoolingRequest,
    model: ServedModel,
    caller: Caller,
    *,
    per_token: bool = False,
    first: int = 0,
) -> PoolWork:
    """The vectors of a body's texts, token ids or conversation. `first`: number of the first input, for errors.

    Raises: BadRequest.
    """
    dimensions = body.dimensions or 0
    if dimensions > model.hidden_size:
        raise BadRequest(
            f"dimensions={dimensions} is more than the {model.hidden_size} of {model.name!r}", param="dimensions"
        )
    work = PoolWork(
        model.base,
        _inputs(body, model, first),
        dimensions or model.hidden_size,
        body.normalize is not False,
        dimensions,
        per_token,
        caller.tenant,
        caller.priority,
    )
    sizes = [work.result_bytes(each) for each in work.inputs]
    if max(sizes) > MAX_PART_RESULT_BYTES:
        index = sizes.index(max(sizes))
        raise BadRequest(
            f"the vectors of input {first + index} would take {sizes[index]} bytes, more than {MAX_PART_RESULT_BYTES}: "
            "send a shorter input, or fewer dimensions",
            param="input",
        )
    if sum(sizes) > _MAX_RESULT_BYTES:
        raise BadRequest(
            f"the vectors would take {sum(sizes)} bytes, more than {_MAX_RESULT_BYTES}: send fewer inputs in one request",
            param="input",
        )
    return work


def _inputs(
    body: EmbeddingRequest | PoolingRequest, model: ServedModel, first: int, param: str = "input"
) -> list[PoolInput]:
    """param: the field that the client's own body has for `input`, for errors."""
    limit = _limit(body, model)
    part = WHOLE if limit is None else Part(limit, from_end=body.truncation_side == "left")
    if body.messages is not None:
        if not model.tokenizer.template_source:
            raise BadRequest("this model has no chat template: send texts as `input`", param="messages")
        fitted = model.tokenizer.fit_chat([message.for_template() for message in body.messages])
        text = model.tokenizer.render_chat(
            fitted.messages, add_generation_prompt=bool(body.add_generation_prompt), kwargs=body.chat_template_kwargs
        )
        found = [model.tokenizer.encode_chat(text, add_special_tokens=bool(body.add_special_tokens), part=part)]
        return _checked(found, body, model, "messages", first)
    texts = [each for each in body.input or [] if isinstance(each, str)]
    if not texts:
        found = [list(each) for each in body.input or [] if not isinstance(each, str)]
        return _checked(found, body, model, param, first)
    if limit is None:
        for index, text in enumerate(texts, first):  # refuse what cannot fit before it is encoded
            if (at_least := model.tokenizer.min_tokens(text)) > model.max_model_len:
                raise _too_long(model, index, f"at least {at_least}", param)
    special = body.add_special_tokens is not False
    found = model.tokenizer.encode_batch(texts, add_special_tokens=special, part=part)
    if limit is not None and special:
        found = [
            ids if len(ids) <= limit else model.tokenizer.cut(ids, limit, keep_last=part.from_end) for ids in found
        ]
    return _checked(found, body, model, param, first)


def _limit(body: PoolingFields, model: ServedModel) -> int | None:
    """Length to which longer inputs are cut; None: they are refused."""
    asked = body.truncate_prompt_tokens
    return None if asked is None else model.max_model_len if asked == -1 else min(asked, model.max_model_len)


def _checked(
    found: list[list[int]], body: EmbeddingRequest | PoolingRequest, model: ServedModel, param: str, first: int
) -> list[PoolInput]:
    """The inputs, cut if the body says so.

    Raises: BadRequest if an input does not have one to `max_model_len` tokens, or has one outside the vocabulary.
    """
    if (cut := _limit(body, model)) is not None:
        found = [ids[-cut:] if body.truncation_side == "left" else ids[:cut] for ids in found]
    for index, ids in enumerate(found, first):
        if not ids:
            raise BadRequest(f"input {index} is empty", param=param)
        if len(ids) > model.max_model_len:
            raise _too_long(model, index, str(len(ids)), param)
        if not 0 <= min(ids) <= max(ids) < model.vocab_size:
            raise BadRequest(
                f"input {index} has token ids that are not at least 0 and below {model.vocab_size}: they must come from "
                "this model's own tokenizer; or send texts",
                param=param,
            )
    return [PoolInput(pack_ids(ids)) for ids in found]


def _too_long(model: ServedModel, index: int, tokens: str, param: str) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {model.max_model_len} tokens. However, input {index} has {tokens} tokens. "
        "Please shorten it, or let it be cut with truncate_prompt_tokens=-1.",
        param=param,
        code="context_length_exceeded",
    )


Pairs = Sequence[tuple[str, Sequence[str]]]
"""Texts, each with those it is compared with."""


def pairs_of(body: ScoreRequest | RerankRequest) -> Pairs:
    """The pairs of texts that a body compares."""
    if isinstance(body, RerankRequest):
        return [(body.query, body.documents)]
    if len(body.text_1) == 1:
        return [(body.text_1[0], body.text_2)]
    return [(first, [second]) for first, second in zip(body.text_1, body.text_2, strict=True)]


def comparison_work(
    body: ScoreRequest | RerankRequest, model: ServedModel, caller: Caller, *, first: tuple[int, int] = (0, 0)
) -> PoolWork:
    """What the model computes so that a body's texts can be compared. `first`: numbers of the first `text_1` and `text_2`,
    for errors.

    Raises: BadRequest.
    """
    return (_pair_work if model.task == "score" else _compared_work)(body, model, caller, first)


def _pair_work(
    body: ScoreRequest | RerankRequest, model: ServedModel, caller: Caller, first_numbers: tuple[int, int]
) -> PoolWork:
    """What a cross-encoder computes: one score for each pair."""
    limit = _limit(body, model)
    second_limit = body.max_tokens_per_doc if isinstance(body, RerankRequest) else None
    param = "documents" if isinstance(body, RerankRequest) else body.names[1]
    inputs: list[PoolInput] = []
    for first, seconds in pairs_of(body):
        for ids, second_at in model.tokenizer.encode_pairs(first, seconds, limit=limit, second_limit=second_limit):
            if len(ids) > model.max_model_len:
                raise _too_long(model, first_numbers[1] + len(inputs), str(len(ids)), param)
            if not ids:
                raise BadRequest(f"pair {first_numbers[1] + len(inputs)} is empty", param=param)
            inputs.append(PoolInput(pack_ids(ids), second_at))
    return PoolWork(model.base, inputs, 1, normalize=body.activates, tenant=caller.tenant, priority=caller.priority)


def _compared_work(
    body: ScoreRequest | RerankRequest, model: ServedModel, caller: Caller, first_numbers: tuple[int, int]
) -> PoolWork:
    """What an embedding model computes to compare texts: the vectors of `text_1`, or the query, then those of the others."""
    pairs = pairs_of(body)
    cut = body.truncate_prompt_tokens
    texts = [first for first, _ in pairs], [second for _, seconds in pairs for second in seconds]
    if isinstance(body, RerankRequest):
        params, second_limit = ("query", "documents"), body.max_tokens_per_doc
    else:
        params, second_limit = body.names, None
    inputs: list[PoolInput] = []
    for side, param, limit, number in zip(texts, params, (None, second_limit), first_numbers, strict=True):
        limits = [each for each in (cut, limit) if each is not None and each > 0]
        fields = {"input": side, "truncate_prompt_tokens": min(limits, default=cut)}
        inputs += _inputs(EmbeddingRequest.model_validate(fields), model, number, param)
    return PoolWork(model.base, inputs, model.hidden_size, tenant=caller.tenant, priority=caller.priority)
