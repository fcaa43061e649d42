"""Collects what a format has read, and runs a format as an `OutputParser`. Pure; runs on the router's event loop."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from router.output.base import ParsedDelta, Part, Text, ToolCallDelta, joined
from router.output.reader import Steps, TextReader


def call_id() -> str:
    """A new id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


class OutputWriter:
    """The parts of an answer since the last `take`.

    White space before a tool call, and after the last one, belongs to the calls' markup and is dropped. So white space at
    the end of the content waits for what follows it. `single_call`: later calls are dropped.
    """

    def __init__(self, make_id: Callable[[], str] = call_id, *, single_call: bool = False) -> None:
        self._make_id = make_id
        self._single_call = single_call
        self._parts: list[Part] = []
        self._space: list[str] = []
        """White space at the end of the content."""
        self._after_call = False
        self._num_calls = 0
        self._kinds: set[bool] = set()
        """Which of content (False) and reasoning (True) there has been."""
        self._to_separate: set[bool] = set()

    def message(self) -> None:
        """Begin a new message: a line break comes between its text and earlier text of the same kind."""
        self._space = []
        self._to_separate = set(self._kinds)

    def content(self, text: str) -> None:
        """Append content."""
        shown = text.rstrip()
        if shown:
            self._add_text("".join([*self._space, shown]), reasoning=False)
            self._space = []
            self._after_call = False
        self._space.append(text[len(shown) :])

    def reasoning(self, text: str) -> None:
        """Append reasoning."""
        self._add_text(text, reasoning=True)

    def _add_text(self, text: str, *, reasoning: bool) -> None:
        if reasoning in self._to_separate:
            self._to_separate.remove(reasoning)
            self._parts.append(Text("\n", reasoning, between=True))
        self._kinds.add(reasoning)
        self._parts.append(Text(text, reasoning))

    def call(self, name: str, call_id: str | None = None) -> None:
        """Begin the next tool call. `call_id`: the one that the model wrote."""
        self._add(ToolCallDelta(self._num_calls, call_id or self._make_id(), name))
        self._num_calls += 1
        self._space = []
        self._after_call = True

    def arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
        self._add(ToolCallDelta(self._num_calls - 1, arguments=text))

    def _add(self, part: ToolCallDelta) -> None:
        if part.call == 0 or not self._single_call:
            self._parts.append(part)

    def take(self, *, final: bool = False) -> ParsedDelta:
        """What is new. `final`: nothing follows."""
        if final and not self._after_call:
            self._parts += map(Text, self._space)
            self._space = []
        parts, self._parts = self._parts, []
        return joined(parts)


Functions = Mapping[str, dict[str, Any] | None]
"""The functions that a model may call: the schemas of their parameters by name."""

Format = Callable[[TextReader, OutputWriter], Steps[None]]
"""Reads a whole answer. It may raise nothing, and returns only when the text has ended."""


class FormatParser:
    """An `OutputParser` that follows one format."""

    def __init__(self, read: Format, make_id: Callable[[], str] = call_id, *, single_call: bool = False) -> None:
        self._reader = TextReader()
        self._writer = OutputWriter(make_id, single_call=single_call)
        self._steps = read(self._reader, self._writer)
        next(self._steps, None)

    def push(self, text: str) -> ParsedDelta:
        self._reader.feed(text)
        next(self._steps, None)
        return self._writer.take()

    def finish(self) -> ParsedDelta:
        self._reader.end()
        next(self._steps, None)
        return self._writer.take(final=True)
