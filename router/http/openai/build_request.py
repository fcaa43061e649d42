"""From a parsed body to `GenerationRequest`: renders and tokenizes the prompt, checks it against the model's limits.

Pure; runs on the router's event loop, or on a thread for large bodies.
"""

from __future__ import annotations

import hashlib
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


def chat_prompt(body: ChatRequest, model: ServedModel) -> str:
    """The prompt text of a conversation, with its special tokens. Raises: BadRequest, as `Tokenizer.render_chat`."""
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    return model.tokenizer.render_chat(
        messages, add_generation_prompt=body.add_generation_prompt is not False, kwargs=body.chat_template_kwargs
    )


def chat_generation(body: ChatRequest, model: ServedModel, caller: Caller) -> GenerationRequest:
    prompt_ids = _encode(model, chat_prompt(body, model), "messages", add_special_tokens=False)
    return _generation_request(body, model, prompt_ids, "messages", caller)


def completion_generation(
    body: CompletionRequest, model: ServedModel, prompt: str | list[int], caller: Caller
) -> GenerationRequest:
    if isinstance(prompt, str):
        prompt = _encode(model, prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)
    return _generation_request(body, model, prompt, "prompt", caller)


def _encode(model: ServedModel, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    at_least = model.tokenizer.min_tokens(text)
    if at_least > model.max_model_len:
        raise _too_long(model, f"at least {at_least}", at_least, 0, param)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


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
