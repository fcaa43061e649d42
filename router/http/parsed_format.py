"""What the response shapes of named events share (Messages, Responses): one choice, parsed, framed by each event's type. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from router.http.format import Format, FormatOptions
from router.http.json_body import Json, to_json
from router.http.openai.checks import as_object
from router.output.base import OutputParser, ParsedDelta, Part, parse_parts, unparsed
from router.requests.generation import Generation
from router.requests.request import Delta
from router.text.tokenizer import Tokenizer


class ParsedFormat(Format):
    """`parsers`: that of the one choice; none where all text is content."""

    def __init__(self, options: FormatOptions, tokenizer: Tokenizer, parsers: Sequence[OutputParser]) -> None:
        super().__init__(options, tokenizer)
        self._parser = parsers[0] if parsers else None

    def events(self, part: Part) -> list[Json]:
        """The events of a part of the output."""
        raise NotImplementedError

    def last_events(self, generation: Generation) -> list[Json]:
        """The events after all output."""
        raise NotImplementedError

    def delta(self, delta: Delta, index: int) -> list[Json]:
        return self._events(self._parsed(delta.text))

    def closing(self, generation: Generation, index: int, last: Delta) -> list[Json]:
        events = self.delta(last, index)
        if self._parser is not None:
            events += self._events(self._parser.finish())
        return events + self.last_events(generation)

    def frame(self, chunk: Json) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + to_json(chunk) + b"\n\n"

    def _events(self, parsed: ParsedDelta) -> list[Json]:
        return [event for part in parsed.parts for event in self.events(part)]

    def _parsed(self, text: str) -> ParsedDelta:
        return unparsed(text) if self._parser is None else self._parser.push(text)

    def _whole(self, deltas: Sequence[Delta]) -> ParsedDelta:
        text = "".join(delta.text for delta in deltas)
        return unparsed(text) if self._parser is None else parse_parts(self._parser, text)


def arguments_object(text: str, *, cut_off: bool = False) -> dict[str, Any]:
    """A call's arguments as an object; those that are not JSON stay text. `cut_off`: a limit or a stop string may have cut them
    off; then the object has what is complete.
    """
    try:
        found = as_object(from_json(text or "{}", allow_inf_nan=False, allow_partial=cut_off))
        json.dumps(found, allow_nan=False)  # 1e999 was read as infinite
    except ValueError:
        found = None
    return {"partial_json": text} if found is None else found
