"""From a parsed body to `GenerationRequest`: renders and tokenizes the prompt, checks it against the model's limits.

Pure; runs on the router's event loop, or on a thread for large bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from starlette.types import Scope

from common.base.errors import BadRequest, PromptTooLong
from common.control.identities import Ids, pack_ids
from common.control.messages import MAX_PREDICTION, EngineRequest, Grammar
from router.http.client import client_of
from router.http.openai.chat_grammar import chat_grammar
from router.http.openai.chat_request import ChatRequest
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.sampling_params import bad_word_ids, sampling_params
from router.http.openai.shared_fields import CompletionRequestBase
from router.http.request_headers import header
from router.models.served_model import ServedModel
from router.output.base import OutputParser
from router.requests.queued_request import NOBODY, Tenant
from router.requests.request import GenerationRequest, TraceContext
from router.structured.relaxed import Relaxed
from router.structured.tool_markup import written_calls
from router.text.chat_template import before_mark, with_mark
from router.text.tokenizer import WHOLE, Part

_MAX_KEY_CHARS = 256
"""Maximum length of a session's or user's name; the rest is cut off."""
_MAX_TRACEPARENT_CHARS, _MAX_TRACESTATE_CHARS = 55, 512
"""Longest headers that W3C's Trace Context asks for. Longer ones are ignored, because a request's story keeps them in memory."""


class Caller(NamedTuple):
    """`tenant`: the fair share that a request counts against. `session`: requests of one session go to the same nodes.
    `priority`: that of the body, limited to what the client may use.
    """

    tenant: Tenant = NOBODY
    session: str = ""
    priority: int = 0
    trace: TraceContext | None = None


def caller_of(scope: Scope, user: str | None, priority: int | None) -> Caller:
    """The caller of a request with these fields; the session is the header `x-session-id`, else the `user` field."""
    client, user = client_of(scope), (user or "")[:_MAX_KEY_CHARS]
    session = header(scope, b"x-session-id")[:_MAX_KEY_CHARS] or user
    return Caller(Tenant(client.name, user), session, max(priority or 0, client.highest_priority), _trace_of(scope))


def _trace_of(scope: Scope) -> TraceContext | None:
    """The client's trace context; None without a usable `traceparent`."""
    parent, state = header(scope, b"traceparent"), header(scope, b"tracestate")
    if not parent or len(parent) > _MAX_TRACEPARENT_CHARS:
        return None
    return TraceContext(parent, state if len(state) <= _MAX_TRACESTATE_CHARS else "")


class ChatGeneration(NamedTuple):
    """`new_parser` makes the parser of one choice; None: all text is content."""

    request: GenerationRequest
    new_parser: Callable[[], OutputParser] | None
    changes: tuple[str, ...]
    """What was changed in the messages so that the chat template takes them."""

    def parsers(self, count: int = 1) -> list[OutputParser]:
        """One for each choice; none if all text is content."""
        return [] if self.new_parser is None else [self.new_parser() for _ in range(count)]


class ChatPrompt(NamedTuple):
    """`text`: for `Tokenizer.encode_chat`. `changes`: as in `ChatGeneration`."""

    text: str
    changes: tuple[str, ...]


def chat_prompt(body: ChatRequest, model: ServedModel) -> ChatPrompt:
    """The prompt of a conversation.

    Raises: BadRequest for what `Tokenizer.render_chat` refuses, and for tools whose calls could not be read.
    """
    write = partial(written_calls, "hermes" if model.output_formats.tools is None else model.output_formats.tools.name)
    if body.offered_tools:
        _check_tools(body, model)
    messages, tools, shown = model.tokenizer.fit_tools(
        [message.for_template() for message in body.messages],
        [tool.for_template() for tool in body.offered_tools],
        write,
    )
    messages, changes = model.tokenizer.fit_chat(messages, with_tools=bool(tools))
    text = model.tokenizer.render_chat(
        with_mark(messages) if body.continue_final_message else messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        kwargs=body.chat_template_kwargs,
        effort=body.reasoning_effort,
    )
    return ChatPrompt(before_mark(text) if body.continue_final_message else text, (*shown, *changes))


def _check_tools(body: ChatRequest, model: ServedModel) -> None:
    """Raises: BadRequest for tools that cannot be shown, or whose calls could not be read, with all that is missing."""
    formats, tokenizer = model.output_formats, model.tokenizer
    missing: list[str] = []
    options: list[str] = []
    if formats.tools is None:
        missing.append("tools are switched off (--tool-call-parser none)")
        options.append("another --tool-call-parser")
    if not tokenizer.template_source:
        missing.append("this model has no chat template")
        options.append("--chat-template FILE")
    elif not tokenizer.takes_tools:
        missing.append("this model's chat template has no place for tools")
        options.append("--chat-template FILE or --fit-conversations true")
    unknown = formats.assumed and tokenizer.shows_tools and not body.must_call
    if unknown or (formats.assumed and missing):
        missing.append("the format of this model's tool calls is not known")
        options.append("--tool-call-parser NAME")
    if missing:
        others = "'none', or 'required' or a function's name, whose call is forced" if unknown else "'none'"
        raise BadRequest(
            f"{', and '.join(missing)}; send tool_choice={others}, or start the router with {' and '.join(options)}",
            param="tools",
        )


def chat_generation(body: ChatRequest, model: ServedModel, caller: Caller) -> ChatGeneration:
    """Raises: BadRequest."""
    text, changes = chat_prompt(body, model)
    _check_length(body, model, text, "messages")
    request = _generation_request(
        body,
        model,
        model.tokenizer.encode_chat(
            text, add_special_tokens=bool(body.add_special_tokens), part=_kept_part(body, model)
        ),
        "messages",
        caller,
    )
    last = body.messages[-1]
    if body.echo and last.role == "assistant":
        request = replace(request, echo=last.content or "")
    tags = model.output_formats.reasoning
    if body.continue_final_message and tags is not None:
        text = tags.prompt_before(text, last.content or "")
    functions = {tool.function.name: tool.function.parameters for tool in body.may_call}
    new_parser = model.output_formats.parser(
        text,
        functions,
        single_call=body.parallel_tool_calls is False,
        with_reasoning=body.include_reasoning is not False,
    )
    if new_parser is not None:
        request = replace(request, visible_tokens=model.marker_ids)
    relaxed = Relaxed()
    grammar = chat_grammar(body, model, text, relaxed)
    return ChatGeneration(_with_grammar(request, grammar, relaxed), new_parser, changes)


def _with_grammar(request: GenerationRequest, found: tuple[str, Grammar] | None, relaxed: Relaxed) -> GenerationRequest:
    """found: a grammar, and the request's field that it comes from."""
    if found is None:
        return request
    param, grammar = found
    sampling = request.engine.sampling._replace(grammar=grammar)
    return replace(
        request, engine=request.engine._replace(sampling=sampling), grammar_param=param, relaxed=relaxed.names
    )


def completion_generation(
    body: CompletionRequest, model: ServedModel, prompt: str | list[int], caller: Caller
) -> GenerationRequest:
    if not isinstance(prompt, str):
        prompt_ids = prompt
    elif body.suffix:
        prompt_ids = _fill_in_the_middle(body, model, prompt, body.suffix)
    else:
        _check_length(body, model, prompt, "prompt")
        special = body.add_special_tokens is not False
        prompt_ids = model.tokenizer.encode(prompt, add_special_tokens=special, part=_kept_part(body, model))
    relaxed = Relaxed()
    found = body.grammar_source(relaxed)
    grammar = None if found is None else (found[0], Grammar(found[1]))
    generation = _with_grammar(_generation_request(body, model, prompt_ids, "prompt", caller), grammar, relaxed)
    if not body.echo or not generation.detokenize:
        return generation
    kept = generation.engine.prompt_ids
    if isinstance(prompt, str) and len(kept) == len(prompt_ids):
        return replace(generation, echo=prompt)
    return replace(
        generation, echo=model.tokenizer.decode(kept.tolist(), skip_special_tokens=generation.skip_special_tokens)
    )


def _fill_in_the_middle(body: CompletionRequest, model: ServedModel, prompt: str, suffix: str) -> list[int]:
    tokenizer, fim = model.tokenizer, model.tokenizer.fim_ids
    if fim is None:
        raise BadRequest("this model has no fill-in-the-middle tokens, which suffix needs", param="suffix")
    _check_length(body, model, prompt, "prompt")
    _check_length(body, model, suffix, "suffix")
    begin = tokenizer.encode("", add_special_tokens=body.add_special_tokens is not False)
    before, after = tokenizer.encode(prompt, add_special_tokens=False), tokenizer.encode_within(suffix)
    return [*begin, fim.prefix, *before, fim.suffix, *after, fim.middle]


def _check_length(body: CompletionRequestBase, model: ServedModel, text: str, param: str) -> None:
    """Refuse what cannot fit before it is encoded."""
    at_least = model.tokenizer.min_tokens(text)
    if at_least > model.max_model_len and body.truncate_prompt_tokens is None:
        raise _too_long(model, f"at least {at_least}", at_least, 0, param)


def _too_long(model: ServedModel, total: str, prompt: int, completion: int, param: str) -> PromptTooLong:
    return PromptTooLong(
        f"This model's maximum context length is {model.max_model_len} tokens. However, you requested {total} tokens "
        f"({prompt} in the {param}, {completion} in the completion). Please reduce the length of the {param} or "
        "completion.",
        param=param,
        tokens=prompt,
        limit=model.max_model_len - 1,
    )


def _generation_request(
    body: CompletionRequestBase, model: ServedModel, prompt_ids: list[int], param: str, caller: Caller
) -> GenerationRequest:
    """Fit a prompt into the model's limits.

    Raises: BadRequest when it is empty, too long, or has ids outside the vocabulary.
    """
    if not prompt_ids:
        raise BadRequest("the prompt is empty", param=param)
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < model.vocab_size:
        raise BadRequest(f"token ids must be at least 0 and below {model.vocab_size}", param=param)
    given = vars(body)  # quicker to read than attributes
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        beyond = [token_id for token_id in given[name] or () if not 0 <= token_id < model.vocab_size]
        if beyond:
            raise BadRequest(f"token id {beyond[0]} is not at least 0 and below {model.vocab_size}", param=name)
    wanted = body.token_limit
    if given["truncate_prompt_tokens"] is not None:
        answer = wanted if wanted and wanted < model.max_model_len else 1
        prompt_ids = _truncated(prompt_ids, body, model.max_model_len - answer)
    room = model.max_model_len - len(prompt_ids)
    asked = 1
    if wanted is not None and wanted > room and body.model_fields_set & {"max_tokens", "max_completion_tokens"}:
        asked = wanted
    if asked > room:
        raise _too_long(model, str(len(prompt_ids) + asked), len(prompt_ids), asked, param)
    defaults = model.sampling_defaults
    usual = defaults.max_tokens and max(defaults.max_tokens, given["min_tokens"] or 0)
    max_tokens = min(wanted or usual or room, room) if wanted != 0 else 1
    sampling = sampling_params(
        body,
        max_tokens=max_tokens,
        eos_token_ids=model.eos_token_ids,
        bad_words=_bad_words(body, model) if given["bad_words"] else [],
        defaults=defaults,
    )
    beyond = [token_id for token_id, _ in sampling.logit_bias if token_id >= model.vocab_size]
    if beyond:
        raise BadRequest(f"the token ids must be below {model.vocab_size}; {beyond[0]} is not", param="logit_bias")
    return GenerationRequest(
        EngineRequest(
            pack_ids(prompt_ids),
            sampling,
            given["cache_salt"] or "",
            caller.priority,
            model.adapter,
            prediction=_prediction(body, model),
            tenant=caller.tenant.digest,
        ),
        stop=tuple(given["stop"]),
        client_stop_ids=frozenset(given["stop_token_ids"] or ()),
        include_stop=bool(given["include_stop_str_in_output"]),
        skip_special_tokens=given["skip_special_tokens"] is not False,
        detokenize=given["detokenize"] is not False,
        open_ended=not (wanted or usual),
        prompt_only=wanted == 0,
        tenant=caller.tenant,
        trace=caller.trace,
        session=caller.session,
    )


def _kept_part(body: CompletionRequestBase, model: ServedModel) -> Part:
    """What `_truncated` needs of a prompt."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return WHOLE
    return Part(model.max_model_len if limit == -1 else limit, from_end=body.truncation_side != "right")


def _truncated(prompt_ids: list[int], body: CompletionRequestBase, longest: int) -> list[int]:
    """The part of the prompt that the body asks to keep. `longest`: how many tokens leave room for the answer."""
    limit = body.truncate_prompt_tokens
    count = longest if limit is None or limit == -1 else limit
    return prompt_ids[:count] if body.truncation_side == "right" else prompt_ids[-count:]


def _prediction(body: CompletionRequestBase, model: ServedModel) -> Ids:
    """As the answer would be tokenized. Raises: BadRequest if it is longer than any answer."""
    if body.prediction is None:
        return pack_ids()
    text = body.prediction.text
    longest = min(model.max_model_len, MAX_PREDICTION)
    ids = model.tokenizer.encode_within(text) if model.tokenizer.min_tokens(text) <= longest else []
    if len(ids) > longest or (text and not ids):
        raise BadRequest(
            f"the prediction has more than {longest} tokens, more than an answer can have", param="prediction"
        )
    return pack_ids(token_id for token_id in ids if token_id < model.vocab_size)


def _bad_words(body: CompletionRequestBase, model: ServedModel) -> list[Ids]:
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    return list(map(pack_ids, bad_word_ids(body.bad_words or (), encode)))
