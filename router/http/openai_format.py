"""OpenAI's response shapes, as plain dicts. Pure; the per-chunk functions are the router's hot path.

`ChatFormat` and `TextFormat` have the same methods, so that one driver serves both calls, streamed or not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pydantic_core

from common.base.errors import ClientError, KvRelayError, Overloaded
from common.control.messages import TokenLogprobs
from router.fast.text_events import TextEvents
from router.requests.generation import Generation
from router.requests.request import Delta, Outcome
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer

Json = dict[str, Any]
_LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    try:
        return pydantic_core.to_json(value)
    except pydantic_core.PydanticSerializationError:  # an unpaired surrogate, which can only come from a client
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def sse(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_body(error: KvRelayError) -> Json:
    """An error in OpenAI's shape."""
    if isinstance(error, ClientError):
        kind = "invalid_request_error"
    elif isinstance(error, Overloaded):
        kind = "rate_limit_error"
    else:
        kind = "server_error"
    return {
        "error": {
            "message": error.message or error.code,
            "type": kind,
            "param": getattr(error, "param", None),
            "code": error.code,
        }
    }


def usage(generations: Sequence[Generation], completion: int | None = None) -> Json:
    """Token counts over all choices. `completion`: number of tokens sent so far; None: all."""
    prompt = sum(len(generation.request.engine.prompt_ids) for generation in generations)
    if completion is None:
        completion = sum(generation.completion_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(generation.cached_tokens for generation in generations)},
    }


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> list[Json]:
    """The log-probability entries of `/v1/chat/completions`."""
    entries: list[Json] = []
    for token_id, found in zip(delta.token_ids, delta.logprobs or [], strict=False):
        entry = _chat_entry(tokenizer, token_id, found.logprob)
        entry["top_logprobs"] = [
            _chat_entry(tokenizer, other, logprob)
            for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
        ]
        entries.append(entry)
    return entries


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    piece = tokenizer.pieces.piece(token_id)
    return {"token": piece.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(piece)}


class TextLogprobs:
    """The log-probabilities of `/v1/completions`, whose text offsets continue from chunk to chunk.

    A token's offset is that of the first character in the choice's text that the token contains, wholly or in part.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer.pieces, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        """The `logprobs` object of these tokens."""
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float]] = []
        for token_id, found in zip(token_ids, logprobs, strict=False):
            text = self._tokenizer.text_of(token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(self._text.push(token_id))
            pairs = zip(found.top_ids, found.top_logprobs, strict=True)
            top = {self._tokenizer.text_of(other): max(logprob, _LOWEST) for other, logprob in pairs}
            top.setdefault(text, max(found.logprob, _LOWEST))
            tops.append(top)
        values = [max(found.logprob, _LOWEST) for found in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


@dataclass(frozen=True)
class FormatOptions:
    """The response options that the client chose."""

    request_id: str
    model: str
    with_logprobs: bool = False
    with_token_ids: bool = False
    skip_special_tokens: bool = True
    usage_in_stream: bool = False
    continuous_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


class Format(Protocol):
    """One of the two calls' response shapes."""

    tokenizer: Tokenizer
    options: FormatOptions

    def opening(self, generation: Generation, index: int) -> list[Json]:
        """The stream's first chunks for this choice, before its text."""
        ...

    def delta(self, delta: Delta, index: int) -> Json | None:
        """The chunk for some new tokens; None if there is nothing to show."""
        ...

    def text_event(self, text: str, index: int) -> bytes:
        """The event of `delta` for a client that gets only text; built without the chunk's dict."""
        ...

    def closing(self, outcome: Outcome, index: int) -> Json:
        """The choice's last chunk."""
        ...

    def usage_chunk(self, generations: Sequence[Generation]) -> Json:
        """The stream's last chunk, when asked for."""
        ...

    def logprobs(self, deltas: Sequence[Delta], index: int) -> Json:
        """The log-probabilities of these tokens, which must follow those of the last call."""
        ...

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        """The non-streamed response without log-probabilities, of which there can be millions (`router.http.answer`)."""
        ...


class _BaseFormat:
    """The parts that all chunks of a stream share."""

    def __init__(self, options: FormatOptions, tokenizer: Tokenizer, chunk_kind: str) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self._head: Json = {
            "id": options.request_id,
            "object": chunk_kind,
            "created": options.created,
            "model": options.model,
        }
        self._text_events = TextEvents()

    def delta(self, delta: Delta, index: int) -> Json | None:
        raise NotImplementedError

    def text_event(self, text: str, index: int) -> bytes:
        return self._text_events.event(index, to_json(text), self._whole_text_event)

    def _whole_text_event(self, text: str, index: int) -> bytes:
        chunk = self.delta(Delta(text, [], None), index)
        assert chunk is not None
        return sse(chunk)

    def chunk(self, choice: Json | None) -> Json:
        body: Json = {**self._head, "choices": [] if choice is None else [choice]}
        if self.options.usage_in_stream:
            body["usage"] = None
        return body

    def usage_chunk(self, generations: Sequence[Generation]) -> Json:
        return {**self._head, "choices": [], "usage": usage(generations)}


def _all_ids(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def _reasons(outcome: Outcome | None) -> Json:
    assert outcome is not None
    return {"finish_reason": outcome.finish_reason, "stop_reason": outcome.stop_reason}


class ChatFormat(_BaseFormat):
    """Shapes of `/v1/chat/completions`."""

    def __init__(self, options: FormatOptions, tokenizer: Tokenizer) -> None:
        super().__init__(options, tokenizer, "chat.completion.chunk")

    def opening(self, generation: Generation, index: int) -> list[Json]:
        chunk = self.chunk(self._choice(index, {"role": "assistant", "content": ""}))
        if self.options.with_token_ids:
            chunk["prompt_token_ids"] = generation.request.engine.prompt_ids
        return [chunk]

    def delta(self, delta: Delta, index: int) -> Json | None:
        options = self.options
        if not (delta.text or options.with_token_ids or options.with_logprobs):
            return None
        choice = self._choice(index, {"content": delta.text})
        if options.with_logprobs:
            choice["logprobs"] = self.logprobs([delta], index)
        if options.with_token_ids:
            choice["token_ids"] = delta.token_ids
        return self.chunk(choice)

    def logprobs(self, deltas: Sequence[Delta], index: int) -> Json:
        entries = [entry for delta in deltas for entry in chat_logprobs(self.tokenizer, delta)]
        return {"content": entries, "refusal": None}

    def closing(self, outcome: Outcome, index: int) -> Json:
        return self.chunk({**self._choice(index, {}), **_reasons(outcome)})

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        choices: list[Json] = []
        for index, (generation, parts) in enumerate(zip(generations, deltas, strict=True)):
            content = "".join(part.text for part in parts)
            choice: Json = {
                "index": index,
                "message": {"role": "assistant", "content": content, "refusal": None},
                "logprobs": None,
                **_reasons(generation.outcome),
            }
            if self.options.with_token_ids:
                choice["token_ids"] = _all_ids(parts)
            choices.append(choice)
        body: Json = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(generations)}
        if self.options.with_token_ids:
            body["prompt_token_ids"] = generations[0].request.engine.prompt_ids
        return body

    @staticmethod
    def _choice(index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class TextFormat(_BaseFormat):
    """Shapes of `/v1/completions`."""

    def __init__(self, options: FormatOptions, tokenizer: Tokenizer, num_choices: int) -> None:
        super().__init__(options, tokenizer, "text_completion")
        skip = options.skip_special_tokens
        count = num_choices if options.with_logprobs else 0
        self._logprobs = [TextLogprobs(tokenizer, skip_special_tokens=skip) for _ in range(count)]
        self._single = num_choices == 1

    def opening(self, generation: Generation, index: int) -> list[Json]:
        if not self.options.with_token_ids:
            return []
        ids = generation.request.engine.prompt_ids
        chunk = self.chunk({**self._choice(index, ""), "prompt_token_ids": ids, "token_ids": []})
        if self._single:
            chunk["prompt_token_ids"] = ids
        return [chunk]

    def delta(self, delta: Delta, index: int) -> Json | None:
        options = self.options
        if not (delta.text or options.with_token_ids or options.with_logprobs):
            return None
        choice = self._choice(index, delta.text)
        if options.with_logprobs:
            choice["logprobs"] = self.logprobs([delta], index)
        if options.with_token_ids:
            choice["token_ids"] = delta.token_ids
        return self.chunk(choice)

    def logprobs(self, deltas: Sequence[Delta], index: int) -> Json:
        logprobs = [found for delta in deltas for found in delta.logprobs or []]
        return self._logprobs[index].render(_all_ids(deltas), logprobs)

    def closing(self, outcome: Outcome, index: int) -> Json:
        return self.chunk({**self._choice(index, ""), **_reasons(outcome)})

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        choices: list[Json] = []
        for index, (generation, parts) in enumerate(zip(generations, deltas, strict=True)):
            choice: Json = {
                "index": index,
                "text": "".join(part.text for part in parts),
                "logprobs": None,
                **_reasons(generation.outcome),
            }
            if self.options.with_token_ids:
                choice |= {"prompt_token_ids": generation.request.engine.prompt_ids, "token_ids": _all_ids(parts)}
            choices.append(choice)
        body: Json = {**self._head, "choices": choices, "usage": usage(generations)}
        if self.options.with_token_ids and self._single:
            body["prompt_token_ids"] = generations[0].request.engine.prompt_ids
        return body

    @staticmethod
    def _choice(index: int, text: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
