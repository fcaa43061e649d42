"""Response shapes of `/v1/chat/completions`. Pure; the per-chunk functions are on the router's hot path."""

from __future__ import annotations

from collections.abc import Sequence

from router.http.format import FormatOptions
from router.http.json_body import Json
from router.http.openai.base_format import BaseFormat, all_ids, reasons, usage
from router.http.openai.logprobs import chat_logprobs
from router.output.base import OutputParser, ParsedDelta, ToolCallDelta, parse_parts, unparsed
from router.requests.generation import Generation
from router.requests.request import Delta
from router.text.tokenizer import Tokenizer


class ChatFormat(BaseFormat):
    """`parsers`: one for each choice where the text may contain reasoning or tool calls; none where all of it is content."""

    def __init__(self, options: FormatOptions, tokenizer: Tokenizer, parsers: Sequence[OutputParser] = ()) -> None:
        super().__init__(options, tokenizer, "chat.completion.chunk")
        self._parsers = parsers
        self._called = [False] * len(parsers)
        """By choice: whether it has called a tool."""
        self.text_only = self.text_only and not parsers

    def opening(self, generation: Generation, index: int) -> list[Json]:
        chunk = self.chunk(self._choice(index, {"role": "assistant", "content": generation.request.echo}))
        if self.options.with_token_ids:
            chunk["prompt_token_ids"] = generation.request.engine.prompt_ids.tolist()
        return [chunk]

    def delta(self, delta: Delta, index: int) -> list[Json]:
        choice = self._shown(delta, index, self._parsed(delta.text, index))
        return [] if choice is None else [self.chunk(choice)]

    def closing(self, generation: Generation, index: int, last: Delta) -> list[Json]:
        parsed = self._parsed(last.text, index)
        more = self._parsers[index].finish() if self._parsers else ParsedDelta()
        chunks: list[Json] = []
        if more and parsed:
            first = self._shown(last, index, parsed)
            assert first is not None
            chunks, parsed, last = [self.chunk(first)], more, Delta("", [], None)
        choice = self._shown(last, index, more or parsed) or self._choice(index, {})
        self._note_calls(more, index)
        chunk = self.closing_chunk(choice, generation)
        self._name_calls(chunk["choices"][0], called=bool(self._called) and self._called[index])
        return [*chunks, chunk]

    def logprobs(self, deltas: Sequence[Delta], index: int) -> Json:
        as_ids = self.options.tokens_as_ids
        entries = [entry for delta in deltas for entry in chat_logprobs(self.tokenizer, delta, tokens_as_ids=as_ids)]
        return {"content": entries, "refusal": None}

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        choices: list[Json] = []
        for index, (generation, parts) in enumerate(zip(generations, deltas, strict=True)):
            text = "".join(part.text for part in parts)
            parsed = parse_parts(self._parsers[index], text) if self._parsers else unparsed(text)
            choice: Json = {
                "index": index,
                "message": _message(parsed, generation.request.echo),
                "logprobs": None,
                **reasons(generation.outcome),
            }
            self._name_calls(choice, called=bool(parsed.tool_calls))
            choice["token_ids"] = all_ids(parts) if self.options.with_token_ids else None
            choices.append(choice)
        body: Json = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(generations, self.options.samples),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        if self.options.with_token_ids:
            body["prompt_token_ids"] = generations[0].request.engine.prompt_ids.tolist()
        return body

    def _parsed(self, text: str, index: int) -> ParsedDelta:
        if not self._parsers:
            return unparsed(text)
        parsed = self._parsers[index].push(text)
        self._note_calls(parsed, index)
        return parsed

    def _note_calls(self, parsed: ParsedDelta, index: int) -> None:
        if parsed.tool_calls:
            self._called[index] = True

    def _shown(self, delta: Delta, index: int, parsed: ParsedDelta) -> Json | None:
        """The choice of a chunk; None if there is nothing to show."""
        options = self.options
        if not (parsed or options.with_token_ids or options.with_logprobs):
            return None
        choice = self._choice(index, _delta_fields(parsed))
        if options.with_logprobs:
            choice["logprobs"] = self.logprobs([delta], index)
        if options.with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    @staticmethod
    def _name_calls(choice: Json, *, called: bool) -> None:
        """An answer that stops after tool calls says so."""
        if called and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"

    @staticmethod
    def _choice(index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta_fields(parsed: ParsedDelta) -> Json:
    fields: Json = {}
    if parsed.reasoning:
        fields |= _reasoning(parsed.reasoning)
    if parsed.content or not parsed:
        fields["content"] = parsed.content
    if parsed.tool_calls:
        fields["tool_calls"] = [_call_delta(call) for call in parsed.tool_calls]
    return fields


def _call_delta(call: ToolCallDelta) -> Json:
    function: Json = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.call, "function": function}
    return {"index": call.call, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


def _message(parsed: ParsedDelta, echo: str) -> Json:
    content, calls = echo + parsed.content, parsed.tool_calls
    shown: Json = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        shown["content"] = content or None
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    if reasoning := parsed.reasoning:
        shown |= _reasoning(reasoning)
    return shown


def _reasoning(text: str) -> Json:
    """The reasoning under both names that clients read: the usual one, and that of newer versions of vLLM."""
    return {"reasoning_content": text, "reasoning": text}
