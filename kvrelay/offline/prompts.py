"""From the arguments of `LLM.generate` and `LLM.chat` to checked requests, by the HTTP API's own code. Pure."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from common.base.errors import BadRequest
from common.base.sentences import counted
from kvrelay.offline.run_async import run_async
from kvrelay.offline.sampling_params import SamplingParams, to_request
from router.http.openai.build_request import Caller, chat_generation, chat_prompt, completion_generation
from router.http.openai.chat_request import ChatRequest
from router.http.openai.completion_request import CompletionRequest
from router.models.served_model import ServedModel
from router.requests.request import GenerationRequest

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or as in vLLM `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
Conversation = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None

log = logging.getLogger(__name__)

_CALLER = Caller()
_one_grammar_check = threading.Lock()
"""A `GrammarChecker` is used by one asyncio loop at a time, and each check has its own. Callers may have several threads."""


class PromptJob(NamedTuple):
    """One prompt, checked and tokenized."""

    prompt: str | None
    request: GenerationRequest
    params: SamplingParams
    chat: Mapping[str, Any] | None = None
    """The fields of a chat body that `params` does not have; None: no conversation."""


def generate_jobs(model: ServedModel, prompts: Prompt | Sequence[Prompt], params: Params) -> list[PromptJob]:
    """One job for each prompt. Raises: BadRequest that names the first wrong one."""
    listed = as_list(prompts)

    def job(index: int, each: SamplingParams) -> PromptJob:
        prompt = prompt_value(listed[index])
        body = to_request({"prompt": prompt, **each.completion_fields()}, CompletionRequest)
        return PromptJob(
            prompt if isinstance(prompt, str) else None,
            completion_generation(body, model, body.prompt[0], _CALLER),
            each,
        )

    return _each("prompt", model, job, len(listed), params)


def chat_jobs(
    model: ServedModel,
    messages: Conversation | Sequence[Conversation],
    params: Params,
    options: Mapping[str, Any],
) -> list[PromptJob]:
    """One job for each conversation. `options`: further fields of a chat body. Raises: as `generate_jobs`."""
    given = _conversation(messages)
    listed: list[Any] = [given] if not given or given[0] is None or isinstance(given[0], Mapping) else given

    def job(index: int, each: SamplingParams) -> PromptJob:
        chat = {"messages": _conversation(listed[index]), **options}
        body = to_request({**chat, **each.chat_fields()}, ChatRequest)
        return PromptJob(chat_prompt(body, model).text, chat_generation(body, model, _CALLER).request, each, chat)

    return _each("conversation", model, job, len(listed), params)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """The prompts, also of a single one. Raises: BadRequest."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = _items(prompts)
    return [listed] if listed and all(map(_is_number, listed)) else listed


def prompt_value(prompt: Any) -> Any:
    """The text or the token ids of a prompt. Raises: BadRequest."""
    if isinstance(prompt, Mapping):
        given = cast("Mapping[str, Any]", prompt)
        if len(given) != 1 or not given.keys() <= {"prompt", "prompt_token_ids"}:
            raise BadRequest(f"must have either 'prompt' or 'prompt_token_ids', not {sorted(map(str, given))}")
        prompt = next(iter(given.values()))
    if isinstance(prompt, str):
        return checked_text(prompt)
    try:
        return [_token_id(item) for item in _items(prompt)]
    except TypeError:
        raise BadRequest("must be one text or one list of token ids", param="prompt") from None


def checked_text(text: str) -> str:
    """The text. Raises: BadRequest if no tokenizer takes it, because it has parts of characters (lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"must be Unicode text: {error.reason} at index {error.start}", param="prompt") from None
    return text


def _items(value: Any) -> list[Any]:
    """The items of a sequence or an iterator, also of an array or a tensor. Raises: BadRequest; what an iterator raises."""
    try:
        if isinstance(value, (bytes, bytearray)):
            raise TypeError
        items = iter(value.tolist() if hasattr(value, "tolist") else value)
    except TypeError:
        raise BadRequest(
            f"must be one text or one list of token ids, not {type(value).__name__}", param="prompt"
        ) from None
    return list(items)


def _is_number(item: Any) -> bool:
    """Whether this is no prompt but a token id: an array or a tensor without dimensions is a number."""
    return isinstance(item, int) or getattr(item, "ndim", None) == 0


def _token_id(item: Any) -> int:
    """Raises: TypeError."""
    if isinstance(item, bool):
        raise TypeError
    return operator.index(item)


def _conversation(messages: Any) -> list[Any]:
    """Raises: BadRequest."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise BadRequest(f"messages must be a list, not {type(messages).__name__}", param="messages")
    return list(cast("Sequence[Any]", messages))


def _each(
    what: str, model: ServedModel, make: Callable[[int, SamplingParams], PromptJob], count: int, params: Params
) -> list[PromptJob]:
    jobs: list[PromptJob] = []
    checked: set[str] = set()
    """Grammars: thousands of prompts may share one."""
    for index, each in enumerate(_params_of_each(params, count)):
        try:
            _check_params(each)
            jobs.append(make(index, each))
            grammar = jobs[-1].request.engine.sampling.grammar
            if grammar is not None and grammar.source not in checked:
                with _one_grammar_check:
                    run_async(model.grammars.check(grammar.source, jobs[-1].request.grammar_param))
                checked.add(grammar.source)
                if jobs[-1].request.relaxed:
                    log.warning("the answers are not held to %s of the schema", ", ".join(jobs[-1].request.relaxed))
        except BadRequest as error:
            raise BadRequest(f"{what} {index}: {error.message}", param=error.param, code=error.code) from None
    return jobs


def _params_of_each(params: Params, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, (Mapping, str)) or not isinstance(params, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        _check_params(params)
    if len(params) != count:
        raise BadRequest(f"{len(params)} sampling_params for {counted(count, 'prompt')}", param="sampling_params")
    return params


def _check_params(params: Any) -> None:
    """Raises: BadRequest for what is no `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        raise BadRequest(
            f"sampling_params must be SamplingParams, not {type(params).__name__}", param="sampling_params"
        )
