"""Response shapes of `/v1/messages`: a list of blocks, or the events that build it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.base.errors import KvRelayError
from router.http.error_shapes import anthropic_error
from router.http.json_body import Json
from router.http.parsed_format import ParsedFormat, arguments_object
from router.http.response_headers import serving_details
from router.output.base import Part, Text, ToolCallDelta
from router.requests.generation import Generation
from router.requests.request import Delta

_EMPTY: dict[str, Json] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_PING: Json = {"type": "ping"}


class MessagesFormat(ParsedFormat):
    """Invariant: at most one block of the stream is open."""

    _block = -1
    """Index of the newest block."""
    _open: str | None = None
    """The type of the newest block while it is open."""
    _called = False

    def opening(self, generation: Generation, index: int) -> list[Json]:
        message = self._message([], None, None, _usage(generation, 0))
        return [{"type": "message_start", "message": message}, _PING]

    def ping(self) -> bytes:
        return self.frame(_PING)

    def events(self, part: Part) -> list[Json]:
        if isinstance(part, ToolCallDelta):
            return self._call(part)
        kind = _kind(part)
        if part.between and self._open != kind:
            return []
        return self._in_block(kind, {"type": f"{kind}_delta", kind: part.text})

    def last_events(self, generation: Generation) -> list[Json]:
        reason, sequence = self._stop(generation, called=self._called)
        last: Json = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _usage(generation),
            "kvrelay": serving_details(generation),
        }
        return [*self._close(), last, {"type": "message_stop"}]

    def failure(self, error: KvRelayError, generation: Generation) -> Json:
        return {**anthropic_error(error), "kvrelay": serving_details(generation)}

    def whole(self, generations: Sequence[Generation], deltas: Sequence[list[Delta]]) -> Json:
        (generation,), (parts,) = generations, deltas
        parsed = self._whole(parts)
        stop = self._stop(generation, called=bool(parsed.tool_calls))
        blocks: list[Json] = []
        for part in parsed.parts:
            if isinstance(part, ToolCallDelta):
                cut_off = part is parsed.parts[-1] and stop[0] != "tool_use"
                blocks.append({**_tool_use(part), "input": arguments_object(part.arguments, cut_off=cut_off)})
                continue
            kind = _kind(part)
            if blocks and blocks[-1]["type"] == kind:
                blocks[-1][kind] += part.text
            elif not part.between:
                blocks.append({**_EMPTY[kind], kind: part.text})
        return self._message(blocks, *stop, _usage(generation))

    def _message(self, blocks: list[Json], reason: str | None, sequence: str | None, usage: Json) -> Json:
        return {
            "id": self.options.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.options.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _stop(self, generation: Generation, *, called: bool) -> tuple[str, str | None]:
        """The reason of the end, and the stop sequence."""
        outcome = generation.outcome
        assert outcome is not None
        if outcome.finish_reason == "length":
            limit = self.options.token_limit or 0
            return "max_tokens" if generation.completion_tokens >= limit else "model_context_window_exceeded", None
        if isinstance(outcome.stop_reason, str):
            return "stop_sequence", outcome.stop_reason
        return "tool_use" if called else "end_turn", None

    def _in_block(self, kind: str, delta: Json) -> list[Json]:
        before = [] if self._open == kind else self._start(kind, _EMPTY[kind])
        return [*before, self._delta(delta)]

    def _call(self, call: ToolCallDelta) -> list[Json]:
        found: list[Json] = []
        if call.name is not None:
            self._called = True
            found += self._start("tool_use", {**_tool_use(call), "input": {}})
        if call.arguments:
            found.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return found

    def _start(self, kind: str, block: Json) -> list[Json]:
        closed = self._close()
        self._block, self._open = self._block + 1, kind
        return [*closed, {"type": "content_block_start", "index": self._block, "content_block": block}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._block}]


def _kind(part: Text) -> str:
    """The type of its block, and the name of the text in it."""
    return "thinking" if part.reasoning else "text"


def _tool_use(call: ToolCallDelta) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _usage(generation: Generation, completion: int | None = None) -> Json:
    """Token counts; those read from caches are not among the input tokens."""
    cached = generation.cached_tokens
    return {
        "input_tokens": len(generation.request.engine.prompt_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generation.completion_tokens if completion is None else completion,
    }
