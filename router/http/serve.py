"""What every call that generates does: ids, the body, the generations, the answer. Runs on the router's event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from common.base.errors import KvRelayError
from common.control.http_connection import listener_of
from common.control.messages import WHOLE_VOCABULARY
from router.http.answer import Answer, whole_body
from router.http.beams import BeamRun
from router.http.body import read_body
from router.http.client import count_tokens
from router.http.format import Format, FormatOptions
from router.http.logprob_bounds import MAX_WHOLE, check_logprobs
from router.http.openai.base_format import usage
from router.http.openai.build_request import Caller, ChatGeneration, caller_of, chat_generation, chat_prompt
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import ModelT, read_object
from router.http.openai.samples import samples
from router.http.openai.shared_fields import CompletionRequestBase
from router.http.openai.unknown_fields import names_in_header, refuse_unknown, unknown_fields
from router.http.own_names import note_names
from router.http.request_headers import header
from router.http.response_headers import RawHeaders, RequestIds, headers, printable
from router.http.responses import EventStream, JsonResponse, error_response
from router.http.services import Services
from router.http.turns import yield_turn
from router.models.served_model import ServedModel
from router.output.base import OutputParser
from router.requests.generation import Generation
from router.requests.request import GenerationRequest
from router.text.tokenizer import Tokenizer

_T = TypeVar("_T")

_IDS = "kvrelay.ids"
"""Key of a request's `RequestIds` in its ASGI scope."""
_WARNINGS = "kvrelay.warnings"
"""Key of the headers that warn about a request: texts by name."""


def with_client_id(request: Request, client_id: str | None) -> RequestIds:
    """The request's ids; the client's own may also come in its body."""
    ids: RequestIds = request.scope[_IDS]
    if client_id and not ids.client:
        request.scope[_IDS] = ids = RequestIds(ids.own, printable(client_id))
    return ids


def warnings_of(request: Request) -> RawHeaders:
    """Headers that warn about the request."""
    texts: dict[bytes, list[str]] = request.scope.get(_WARNINGS, {})
    return [(header, ", ".join(found).encode()) for header, found in texts.items()]


def _warn(request: Request, header: bytes, text: str) -> None:
    request.scope.setdefault(_WARNINGS, {}).setdefault(header, []).append(text)


def _note_ignored(request: Request, names: str) -> None:
    """Name fields, or the part of one, that have no effect."""
    _warn(request, b"x-kvrelay-ignored", names)


def caller_from(request: Request, user: str | None, priority: int | None) -> Caller:
    """The caller of a request with these fields. If it may not use its `priority`, that is named as ignored."""
    caller = caller_of(request.scope, user, priority)
    if priority is not None and priority < caller.priority:
        _note_ignored(request, "priority")
    return caller


def admitted_caller(
    request: Request,
    services: Services,
    model: ServedModel,
    user: str | None,
    priority: int | None,
    count: int = 1,
) -> Caller:
    """The caller of `count` requests for which there is room. Called before anything is tokenized.

    Raises: what `Dispatcher.check_room` raises.
    """
    caller = caller_from(request, user, priority)
    services.dispatcher.check_room(model.base, count, caller.tenant, caller.priority)
    return caller


def ids_of(request: Request) -> RequestIds | None:
    """The request's ids; None for a call without them."""
    return request.scope.get(_IDS)


def parse_as(
    request: Request,
    services: Services,
    kind: type[ModelT],
    check: Callable[[dict[str, Any], type[ModelT]], _T],
    *,
    ids: str = "",
) -> Awaitable[tuple[_T, int]]:
    """The body, made by `check`, and its size in bytes, which bounds all work on it.

    `ids`: prefix of the request's ids, which are set before anything can fail, because error responses carry them too;
    empty: the request has none.
    """
    if ids:
        request.scope[_IDS] = RequestIds.make(ids, header(request.scope, b"x-request-id"))
    return parse_by(request, services, lambda fields: kind, check)


async def parse_by(
    request: Request,
    services: Services,
    kind_of: Callable[[dict[str, Any]], type[ModelT]],
    check: Callable[[dict[str, Any], type[ModelT]], _T],
) -> tuple[_T, int]:
    """The body, made by `check`, and its size in bytes; the size bounds all work on it. Notes the fields that no known API has.
    `kind_of`: the kind of a body, by its fields.
    """

    def work(data: bytes) -> tuple[_T, list[str]]:
        fields = read_object(data)
        kind = kind_of(fields)
        note_names(request.scope, kind)
        unknown = unknown_fields(fields, kind)
        if services.options.strict_parameters:
            refuse_unknown(unknown, kind)
        return check(fields, kind), unknown

    (body, unknown), size = await read_and(request, services, work)
    if unknown:
        _note_ignored(request, names_in_header(unknown))
        services.metrics.ignored_fields(len(unknown))
    return body, size


async def read_and(request: Request, services: Services, work: Callable[[bytes], _T]) -> tuple[_T, int]:
    """`work` on the body, and the body's size in bytes."""
    data = await read_body(request, services.max_body_bytes, services.body_deadlines, services.body_work)
    body = await services.body_work.run(request, len(data), lambda: work(data))
    await yield_turn()
    return body, len(data)


async def prepare_chat(
    request: Request, services: Services, body: ChatRequest, size: int, model: ServedModel
) -> ChatGeneration:
    """Render and tokenize a conversation. `size`: bytes of its body. Raises: BadRequest, Overloaded, Unavailable."""
    caller = admitted_caller(request, services, model, body.user, body.priority, body.num_samples)
    chat = await services.body_work.run(
        request, size, lambda: chat_generation(body, model, caller), on_thread=body.has_grammar_text
    )
    if chat.changes:
        _warn(request, b"x-kvrelay-fitted", printable("; ".join(chat.changes)))
    return chat


async def serve_chat(
    request: Request,
    services: Services,
    body: ChatRequest,
    size: int,
    shape: Callable[[FormatOptions, Tokenizer, Sequence[OutputParser]], Format],
) -> Response:
    """Answer a conversation in the shape of a call. `size`: bytes of its body.

    Raises: NotFound for the model, and what `prepare_chat` raises.
    """
    model = services.catalog.model_for(body.model, "generate")
    chat = await prepare_chat(request, services, body, size, model)
    form = shape(format_options(request, services, body, model), model.tokenizer, chat.parsers(body.n or 1))
    return await serve(request, services, model, [chat.request], form, stream=bool(body.stream))


async def count_prompt(
    request: Request, services: Services, body: ChatRequest, size: int, shown: Mapping[str, str]
) -> Response:
    """Answer with the number of a conversation's prompt tokens, behind the fields `shown`. `size`: bytes of its body."""
    ids, model = with_client_id(request, None), services.catalog.get(body.model)
    tokens = await services.body_work.run(
        request, size, lambda: model.tokenizer.encode_chat(chat_prompt(body, model).text)
    )
    return JsonResponse({**shown, "input_tokens": len(tokens)}, headers=ids.headers() + warnings_of(request))


def format_options(
    request: Request, services: Services, body: CompletionRequestBase, model: ServedModel
) -> FormatOptions:
    """The response options of a parsed body."""
    given = vars(body)  # quicker to read than attributes
    as_ids = given["return_tokens_as_token_ids"]
    return FormatOptions(
        request_id=with_client_id(request, given["request_id"]).own,
        model=model.name,
        with_logprobs=body.num_logprobs is not None,
        whole_vocabulary=WHOLE_VOCABULARY in (body.num_logprobs, body.num_prompt_logprobs),
        with_token_ids=bool(given["return_token_ids"]) or given["detokenize"] is False,
        with_prompt_logprobs=given["prompt_logprobs"] is not None,
        echo=bool(given["echo"]),
        tokens_as_ids=services.options.return_tokens_as_token_ids if as_ids is None else as_ids,
        skip_special_tokens=given["skip_special_tokens"] is not False,
        usage_in_stream=body.usage_in_stream or services.options.enable_force_include_usage,
        continuous_usage=body.continuous_usage,
        samples=body.num_samples,
        returned=given["n"] or 1,
        beams=body.beams,
        token_limit=body.token_limit,
        created=int(time.time()),
    )


async def _check_grammars(request: Request, model: ServedModel, wanted: list[GenerationRequest]) -> None:
    """Raises: BadRequest, Overloaded. Warns of keywords that grammars do not enforce."""
    for each in wanted:
        grammar = each.engine.sampling.grammar
        if grammar is not None:
            await model.grammars.check(grammar.source, each.grammar_param)
    relaxed = dict.fromkeys(name for each in wanted for name in each.relaxed)
    if relaxed:
        _warn(request, b"x-kvrelay-relaxed", names_in_header(relaxed))


async def serve(
    request: Request,
    services: Services,
    model: ServedModel,
    wanted: list[GenerationRequest],
    form: Format,
    *,
    stream: bool,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Run the samples of each wanted generation, and answer, streamed or whole. Errors before the first token or ping, and of
    grammars, keep their HTTP status. `before_end` is awaited before the last part is sent."""
    options = form.options
    check_logprobs(wanted, options.samples, model.vocab_size, services.options.max_logprobs)
    await _check_grammars(request, model, wanted)
    await yield_turn()
    answer = Answer(services.options.stream_ping_s, services.whole_vocabulary)
    ids, warnings, handed_over = with_client_id(request, None), warnings_of(request), False
    metrics = services.dispatcher.state(model.base).metrics
    metrics.set_name(model.root)
    metrics.asked(options.returned)

    def submit(request_id: str, wanted: list[GenerationRequest]) -> list[Generation]:
        pieces, on_news = model.tokenizer.pieces, answer.on_news
        generations = services.dispatcher.submit(model.base, request_id, wanted, pieces, on_news, ids.client)
        answer.follow(generations, listener_of(request.scope))
        return generations

    try:
        if options.whole_vocabulary:
            answer.take_place(MAX_WHOLE)
        if options.beams is not None:
            run = BeamRun(options.beams, wanted, model)
            count_tokens(request.scope, lambda: run.used_tokens)
            body = await run.body(form, answer, ids.own, submit, services.dispatcher.config.request_timeout_s)
            return JsonResponse(body, headers=headers(ids, run.first[0]) + warnings) if body else _abandoned()
        generations = submit(ids.own, _with_samples(wanted, options))  # the answer drops them when it closes
        count_tokens(request.scope, lambda: _tried_tokens(generations, options.samples))
        if stream:
            await answer.begun()
            parts = answer.events(form) if before_end is None else _after(before_end, answer.events(form))
            events = EventStream(answer, parts, form.media_type, headers(ids, generations[0]) + warnings)
            handed_over = True
            return events
        deltas = await answer.finished()
        if answer.abandoned:
            return _abandoned()
        await yield_turn()
        body = await whole_body(form, generations, deltas)
        if before_end is not None:
            await before_end()
        return JsonResponse(body, headers=headers(ids, generations[0]) + warnings)
    except KvRelayError as error:
        # Handled here, not in the application's handler, because the headers of a failure also name the nodes tried.
        services.metrics.http_error(error)
        return error_response(error, request.scope, headers(ids, answer.failed_generation(error)) + warnings)
    finally:
        if not handed_over:
            answer.close()


def _with_samples(wanted: list[GenerationRequest], options: FormatOptions) -> list[GenerationRequest]:
    """The samples of each prompt, in a row."""
    ranked = options.returned < options.samples
    return [sample for each in wanted for sample in samples(each, options.samples, ranked=ranked)]


def _abandoned() -> Response:
    """For a client that has disconnected."""
    return Response(status_code=499)


def _tried_tokens(generations: list[Generation], samples: int) -> int:
    """Tokens that the request has used: those of a prompt without any attempt cost nothing. `samples`: answers to each prompt."""
    prompts = [generations[start : start + samples] for start in range(0, len(generations), samples)]
    tried = [sample for prompt in prompts if any(each.decision for each in prompt) for sample in prompt]
    return usage(tried, samples)["total_tokens"]


async def _after(
    before_end: Callable[[], Awaitable[None]], parts: AsyncIterator[tuple[bytes, bool]]
) -> AsyncIterator[tuple[bytes, bool]]:
    """`parts`, the last one after `before_end`."""
    async for data, more in parts:
        if not more:
            await before_end()
        yield data, more
