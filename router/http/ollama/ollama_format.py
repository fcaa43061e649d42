"""Response shapes of ollama's calls: one object, or lines of objects. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from common.base.errors import KvRelayError
from router.http.format import FormatOptions
from router.http.json_body import Json, to_json
from router.http.parsed_format import ParsedFormat, arguments_object
from router.http.response_headers import serving_details
from router.output.base import OutputParser, Part, Text, ToolCallDelta
from router.requests.generation import Generation
from router.requests.request import Delta
from router.text.tokenizer import Tokenizer


class OllamaFormat(ParsedFormat):
    """`chat`: text is in a message, else in `response`. A tool call is shown once it is complete."""

    media_type = b"application/x-ndjson"

    def __init__(
        self, options: FormatOptions, tokenizer: Tokenizer, parsers: Sequence[OutputParser], *, chat: bool
    ) -> None:
        super().__init__(options, tokenizer, parsers)
        self._chat = chat
        self._call: ToolCallDelta | None = None
        self._started_ns = time.monotonic_ns()

    def opening(self, generation: Generation, index: int) -> list[Json]:
        return []

    def events(self, part: Part) -> list[Json]:
        if isinstance(part, Text):
            lines = self._call_line()
            return [*lines, self._line("", part.text, []) if part.reasoning else self._line(part.text, "", [])]
        if part.name is not None:
            lines, self._call = self._call_line(), part
            return lines
        if self._call is not None:
            self._call = self._call._replace(arguments=self._call.arguments + part.arguments)
        return []

    def last_events(self, generation: Generation) -> list[Json]:
        last = {**self._line("", "", []), **self._end(generation), "kvrelay": serving_details(generation)}
        return [*self._call_line(), last]

    def failure(self, error: KvRelayError, generation: Generation) -> Json:
        return {"error": error.message or error.code, "kvrelay": serving_details(generation)}

    def ping(self) -> bytes:
        return self.frame(self._line("", "", []))  # lines of JSON have no comments

    def frame(self, chunk: Json) -> bytes:
        return to_json(chunk) + b"\n"

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        parsed = self._whole(deltas[0])
        calls = [_shown(call) for call in parsed.tool_calls]
        return {**self._line(parsed.content, parsed.reasoning, calls), **self._end(generations[0])}

    def _line(self, text: str, thinking: str, calls: list[Json]) -> Json:
        thoughts: Json = {"thinking": thinking} if thinking else {}
        shown: Json = {"response": text, **thoughts}
        if self._chat:
            shown = {"message": {"role": "assistant", "content": text, **thoughts}}
            if calls:
                shown["message"]["tool_calls"] = calls
        return {"model": self.options.model, "created_at": datetime.now(UTC).isoformat(), **shown, "done": False}

    def _end(self, generation: Generation) -> Json:
        outcome, total_ns = generation.outcome, time.monotonic_ns() - self._started_ns
        assert outcome is not None
        prompt_ns = min(int(1e9 * generation.ttft_s), total_ns)
        return {
            "done": True,
            "done_reason": outcome.finish_reason,
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": len(generation.request.engine.prompt_ids),
            "prompt_eval_duration": prompt_ns,
            "eval_count": generation.completion_tokens,
            "eval_duration": total_ns - prompt_ns,
        }

    def _call_line(self) -> list[Json]:
        """The line of a call that is complete now."""
        call, self._call = self._call, None
        return [] if call is None else [self._line("", "", [_shown(call)])]


def _shown(call: ToolCallDelta) -> Json:
    return {"function": {"name": call.name, "arguments": arguments_object(call.arguments)}}
