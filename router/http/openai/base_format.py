"""What the chunks of both completion calls share. Pure; the per-chunk functions are on the router's hot path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.base.errors import KvRelayError
from router.http.format import Format, FormatOptions
from router.http.json_body import Json, RawJson, error_body, large_json, sse, to_json
from router.http.openai.logprobs import portion_of, prompt_entry
from router.http.response_headers import serving_details
from router.requests.generation import Generation
from router.requests.request import Delta, Outcome
from router.text.tokenizer import Tokenizer

_MARKER = "\0text\0"
"""Marks the place of the text in a serialized event."""


def usage(generations: Sequence[Generation], samples: int = 1, completion: int | None = None) -> Json:
    """Token counts over all generations; each prompt, which `samples` in a row share, counts once.

    `completion`: number of tokens sent so far; None: all.
    """
    prompt = cached = drafted = accepted = 0
    predicting = [generation for generation in generations if generation.request.engine.prediction]
    for generation in predicting:
        drafted += generation.flow.drafted
        accepted += generation.flow.accepted
    for generation in generations[::samples]:
        prompt += len(generation.request.engine.prompt_ids)
        cached += generation.cached_tokens
    if completion is None:
        completion = sum([generation.completion_tokens for generation in generations])
    counts: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if predicting:  # only then, because the numbers depend on measured times, and usage otherwise does not
        rejected = drafted - accepted
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        counts["completion_tokens_details"] = details
    return counts


class BaseFormat(Format):
    """The parts that all chunks of a stream share."""

    done = b"data: [DONE]\n\n"

    def __init__(self, options: FormatOptions, tokenizer: Tokenizer, chunk_kind: str) -> None:
        super().__init__(options, tokenizer)
        self.text_only = not (options.with_logprobs or options.with_token_ids or options.continuous_usage)
        self._head: Json = {
            "id": options.request_id,
            "object": chunk_kind,
            "created": options.created,
            "model": options.model,
        }
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """By choice: the bytes of a text event before and after the text."""

    def prompt_logprobs(self, generation: Generation) -> Iterator[list[Json | RawJson | None]]:
        ids, found = generation.request.engine.prompt_ids, generation.prompt_logprobs
        yield [None]
        portion = portion_of(found)
        for start in range(0, len(found), portion):
            part = found[start : start + portion]
            yield [
                prompt_entry(self.tokenizer, token_id, each)
                for token_id, each in zip(ids[start + 1 :], part, strict=False)
            ]

    def text_event(self, text: str, index: int) -> bytes:
        """An event that contains only text. Events of a choice differ only in it, so just the first one is serialized whole."""
        around = self._around_text.get(index)
        if around is None:
            (chunk,) = self.delta(Delta(_MARKER, [], None), index)
            before, _, after = sse(chunk).partition(to_json(_MARKER))
            around = self._around_text[index] = before, after
        return b"".join((around[0], to_json(text), around[1]))

    def chunk(self, choice: Json) -> Json:
        body: Json = {**self._head, "choices": [choice]}
        if self.options.usage_in_stream:
            body["usage"] = None
        return body

    def ending(self, generations: Sequence[Generation]) -> list[Json]:
        if not self.options.usage_in_stream:
            return []
        return [{**self._head, "choices": [], "usage": usage(generations, self.options.samples)}]

    def failure(self, error: KvRelayError, generation: Generation) -> Json:
        return {**error_body(error), "kvrelay": serving_details(generation)}

    def frame(self, chunk: Json) -> bytes:
        return sse(chunk, large_json) if self.options.whole_vocabulary else sse(chunk)

    def closing_chunk(self, choice: Json, generation: Generation) -> Json:
        """The chunk with the reason. The headers were sent with the first token or ping; only now are the details complete."""
        return {**self.chunk({**choice, **reasons(generation.outcome)}), "kvrelay": serving_details(generation)}


def all_ids(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def reasons(outcome: Outcome | None) -> Json:
    assert outcome is not None
    return {"finish_reason": outcome.finish_reason, "stop_reason": outcome.stop_reason}
