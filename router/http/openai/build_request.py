"""From a parsed body to `GenerationRequest`: renders and tokenizes the prompt, checks it against the model's limits.

Pure; runs on the router's event loop, or on a thread for large bodies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import Scope

from common.base.errors import BadRequest
from common.control.messages import EngineRequest
from router.http.openai.chat_request import ChatRequest
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.sampling_params import sampling_params
from router.http.openai.shared_fields import CompletionRequestBase
from router.http.request_headers import api_key, header
from router.model_catalog import ServedModel
from router.output.base import OutputParser
from router.requests.request import GenerationRequest

_MAX_KEY_CHARS = 256
"""Maximum length of a session's or tenant's name; the rest is cut off."""


class Caller(NamedTuple):
    """`tenant`: the fair share that a request counts against. `session`: requests of one session go to the same nodes."""

    tenant: str
    session: str


def caller_of(scope: Scope, body: CompletionRequestBase, *, with_keys: bool) -> Caller:
    """The tenant is a hash of the API key if keys are configured (`with_keys`), else the `user` field."""
    tenant = user = (body.user or "")[:_MAX_KEY_CHARS]
    if with_keys:
        tenant = hashlib.sha256(api_key(scope).encode()).hexdigest()[:12]
    return Caller(tenant, (header(scope, b"x-session-id") or user)[:_MAX_KEY_CHARS])


class ChatGeneration(NamedTuple):
    """`new_parser` makes the parser of one choice; None: all text is content."""

    request: GenerationRequest
    new_parser: Callable[[], OutputParser] | None


def chat_prompt(body: ChatRequest, model: ServedModel) -> str:
    """The prompt text of a conversation, for `Tokenizer.encode_chat`.

    Raises: BadRequest, as `Tokenizer.render_chat`, and for tools whose calls could not be read.
    """
    tools = body.offered_tools
    if tools and model.output_formats.tools is None:
        raise BadRequest(
            "the format of this model's tool calls is not known; send tool_choice='none', or start the router with "
            "--tool-call-parser NAME",
            param="tools",
        )
    return model.tokenizer.render_chat(
        [message.for_template() for message in body.messages],
        tools=[tool.for_template() for tool in tools],
        add_generation_prompt=body.add_generation_prompt is not False,
        kwargs=body.chat_template_kwargs,
    )


def chat_generation(body: ChatRequest, model: ServedModel, caller: Caller) -> ChatGeneration:
    """Raises: BadRequest."""
    if body.must_call:
        raise BadRequest("a tool_choice that forces a call is not supported yet", param="tool_choice")
    text = chat_prompt(body, model)
    _check_length(model, text, "messages")
    request = _generation_request(body, model, model.tokenizer.encode_chat(text), "messages", caller)
    functions = frozenset(tool.function.name for tool in body.offered_tools)
    new_parser = model.output_formats.parser(text, functions, single_call=body.parallel_tool_calls is False)
    if new_parser is not None:
        request = request._replace(visible_tokens=model.marker_ids)
    return ChatGeneration(request, new_parser)


def completion_generation(
    body: CompletionRequest, model: ServedModel, prompt: str | list[int], caller: Caller
) -> GenerationRequest:
    if isinstance(prompt, str):
        _check_length(model, prompt, "prompt")
        prompt = model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    return _generation_request(body, model, prompt, "prompt", caller)


def _check_length(model: ServedModel, text: str, param: str) -> None:
    """Refuse what cannot fit before it is encoded."""
    at_least = model.tokenizer.min_tokens(text)
    if at_least > model.max_model_len:
        raise _too_long(model, f"at least {at_least}", at_least, 0, param)


def _too_long(model: ServedModel, total: str, prompt: int, completion: int, param: str) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {model.max_model_len} tokens. However, you requested {total} tokens "
        f"({prompt} in the {param}, {completion} in the completion). Please reduce the length of the {param} or "
        "completion.",
        param=param,
        code="context_length_exceeded",
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
    room, wanted = model.max_model_len - len(prompt_ids), body.token_limit
    explicit = body.model_fields_set & {"max_tokens", "max_completion_tokens"}
    if room < 1 or (wanted is not None and explicit and wanted > room):
        asked = wanted if wanted is not None and explicit else 1
        raise _too_long(model, str(len(prompt_ids) + asked), len(prompt_ids), asked, param)
    defaults = model.sampling_defaults
    usual = defaults.max_tokens and max(defaults.max_tokens, body.min_tokens or 0)
    max_tokens = min(wanted or usual or room, room)
    sampling = sampling_params(body, max_tokens=max_tokens, eos_token_ids=model.eos_token_ids, defaults=defaults)
    beyond = [token_id for token_id in body.stop_token_ids or () if token_id >= model.vocab_size]
    if beyond:
        raise BadRequest(f"token id {beyond[0]} is not below {model.vocab_size}", param="stop_token_ids")
    if any(token_id >= model.vocab_size for token_id, _ in sampling.logit_bias):
        raise BadRequest(f"the token ids must be below {model.vocab_size}", param="logit_bias")
    return GenerationRequest(
        EngineRequest(prompt_ids, sampling, body.cache_salt or "", body.priority or 0),
        stop=tuple(body.stop),
        client_stop_ids=frozenset(body.stop_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        tenant=caller.tenant,
        session=caller.session,
    )
