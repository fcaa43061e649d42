"""Response shapes of `/v1/responses`: a list of items, or the numbered events that build it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.base.errors import ClientError, KvRelayError, Overloaded
from router.http.format import FormatOptions
from router.http.json_body import Json
from router.http.openai.logprobs import chat_logprobs
from router.http.parsed_format import ParsedFormat
from router.http.response_headers import serving_details
from router.http.responses_api.item_references import item_id
from router.output.base import OutputParser, Part, ToolCallDelta
from router.requests.generation import Generation
from router.requests.request import Delta
from router.text.tokenizer import Tokenizer

_MOST_UNCOUNTED_CHARS = 1024
_OWN_FIELDS: dict[str, Json] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}, "function_call": {}}


class ResponsesFormat(ParsedFormat):
    """Builds one response. `shown`: the fields that it repeats from its request. `response`: the whole response at the end.

    Invariant: at most one item is open; it is the last one of `_items`.
    """

    def __init__(
        self, options: FormatOptions, tokenizer: Tokenizer, parsers: Sequence[OutputParser], shown: Json
    ) -> None:
        # Items have their log-probabilities in them: nothing is to be filled in.
        super().__init__(replace(options, with_logprobs=False), tokenizer, parsers)
        self._with_logprobs = options.with_logprobs
        self.response: Json | None = None
        self._shown = shown
        self._items: list[Json] = []
        self._open = False
        self._text: list[str] = []
        """The text or the arguments of the open item."""
        self._sequence = 0
        self._logprobs: list[Json] = []
        """Of the open item's text so far."""
        self._new_logprobs: list[Json] = []
        """Of tokens whose text may still be undecided."""
        self._reasoning_tokens = 0
        self._uncounted = ""
        """The end of the reasoning, whose tokens are not counted yet."""

    def begun(self) -> Json:
        """The response before there is any output."""
        return self._response("in_progress")

    def opening(self, generation: Generation, index: int) -> list[Json]:
        begun = self.begun()
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def events(self, part: Part) -> list[Json]:
        if isinstance(part, ToolCallDelta):
            return self._add_call(part)
        if part.reasoning:
            self._count_reasoning(part.text)
        kind = "reasoning" if part.reasoning else "message"
        return [] if part.between and not self._continues(kind) else self._add_text(kind, part.text)

    def delta(self, delta: Delta, index: int) -> list[Json]:
        if self._with_logprobs:
            self._new_logprobs += chat_logprobs(self.tokenizer, delta, tokens_as_ids=self.options.tokens_as_ids)
        return super().delta(delta, index)

    def last_events(self, generation: Generation) -> list[Json]:
        outcome = generation.outcome
        complete = outcome is not None and outcome.finish_reason != "length"
        closed = self._close("completed" if complete else "incomplete")
        status = "completed" if complete else "incomplete"
        self.response = self._response(status, generation)
        if not complete:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        final = self._event(f"response.{status}", response=self.response, kvrelay=serving_details(generation))
        return [*closed, final]

    def failure(self, error: KvRelayError, generation: Generation) -> Json:
        failed = self._response("failed", generation)
        failed["error"] = {"code": _error_code(error), "message": error.message or error.code}
        return self._event("response.failed", response=failed, kvrelay=serving_details(generation))

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        *parts, last = deltas[0] or [Delta("", [], None)]
        if self._with_logprobs:
            for part in parts:
                self.delta(part, 0)
        else:
            last = Delta("".join(delta.text for delta in deltas[0]), [], None)
        self.closing(generations[0], 0, last)
        assert self.response is not None
        return self.response

    def _event(self, kind: str, **fields: object) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _in_item(self, kind: str, **fields: object) -> Json:
        """An event of the open item."""
        index = len(self._items) - 1
        return self._event(kind, item_id=self._items[index]["id"], output_index=index, **fields)

    def _continues(self, kind: str) -> bool:
        """Whether the open item is of this kind."""
        return self._open and self._items[-1]["type"] == kind

    def _add_text(self, kind: str, text: str) -> list[Json]:
        found: list[Json] = []
        if not self._continues(kind):
            found = self._start(kind, content=[])
            found.append(self._in_item("response.content_part.added", content_index=0, part=_part(kind, "")))
        self._text.append(text)
        shown, self._new_logprobs = self._new_logprobs, []
        if kind == "reasoning":
            return [*found, self._in_item("response.reasoning_text.delta", content_index=0, delta=text)]
        self._logprobs += shown
        return [*found, self._in_item("response.output_text.delta", content_index=0, delta=text, logprobs=shown)]

    def _add_call(self, call: ToolCallDelta) -> list[Json]:
        found: list[Json] = []
        if call.name is not None:
            found = self._start("function_call", call_id=call.id, name=call.name, arguments="")
        self._new_logprobs = []
        if call.arguments:
            self._text.append(call.arguments)
            found.append(self._in_item("response.function_call_arguments.delta", delta=call.arguments))
        return found

    def _start(self, kind: str, **fields: object) -> list[Json]:
        closed = self._close("completed")
        own_id = item_id(kind, self.options.request_id, len(self._items))
        item: Json = {"id": own_id, "type": kind, "status": "in_progress"}
        self._items.append({**item, **_OWN_FIELDS[kind], **fields})
        self._open = True
        index = len(self._items) - 1
        return [*closed, self._event("response.output_item.added", output_index=index, item=self._items[index])]

    def _close(self, status: str) -> list[Json]:
        """End the open item. Events that hold it may not have been framed yet: it is replaced, not changed."""
        if not self._open:
            return []
        text, item = "".join(self._text), self._items[-1]
        logprobs = self._logprobs
        self._open, self._text, self._logprobs = False, [], []
        kind = item["type"]
        if kind == "function_call":
            done = self._in_item("response.function_call_arguments.done", name=item["name"], arguments=text)
            events, item = [done], {**item, "arguments": text}
        else:
            name = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            part = _part(kind, text, logprobs)
            beside = {"logprobs": logprobs} if kind == "message" else {}
            events = [
                self._in_item(name, content_index=0, text=text, **beside),
                self._in_item("response.content_part.done", content_index=0, part=part),
            ]
            item = {**item, "content": [part]}
        self._items[-1] = item = {**item, "status": status}
        index = len(self._items) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _response(self, status: str, generation: Generation | None = None) -> Json:
        return {
            "id": self.options.request_id,
            "object": "response",
            "created_at": self.options.created,
            "status": status,
            "model": self.options.model,
            "error": None,
            "incomplete_details": None,
            **self._shown,
            "output": list(self._items),
            "usage": None if generation is None else self._usage(generation),
        }

    def _count_reasoning(self, text: str) -> None:
        """Count the tokens of all but the last words: at the end of a long answer other streams would wait for it."""
        self._uncounted += text
        if len(self._uncounted) > _MOST_UNCOUNTED_CHARS:
            cut = max(0, self._uncounted.rfind(" ")) or len(self._uncounted)
            self._reasoning_tokens += self._num_tokens(self._uncounted[:cut])
            self._uncounted = self._uncounted[cut:]

    def _num_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def _usage(self, generation: Generation) -> Json:
        prompt, completion = len(generation.request.engine.prompt_ids), generation.completion_tokens
        reasoning = self._reasoning_tokens + self._num_tokens(self._uncounted)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, completion)},
            "total_tokens": prompt + completion,
        }


def _part(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _error_code(error: KvRelayError) -> str:
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, ClientError) else "server_error"
