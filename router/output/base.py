"""What generated text means: content, reasoning, tool calls. Pure; runs on the router's event loop, once per delta."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol


class ToolCallDelta(NamedTuple):
    """A part of one tool call. A call's first delta has its id and name; the `arguments` of all its deltas, joined, are one
    JSON object."""

    call: int
    """Number of the call in the answer, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Text(NamedTuple):
    """Content, or reasoning. `between`: the line break that separates two messages where an answer has only one text of each
    kind."""

    text: str
    reasoning: bool = False
    between: bool = False


Part = Text | ToolCallDelta


class ParsedDelta(NamedTuple):
    """The meaning of some new text: its parts in order. None is an empty text."""

    parts: Sequence[Part] = ()

    @property
    def content(self) -> str:
        """All content, joined; reasoning and calls in between are left out."""
        return "".join([part.text for part in self.parts if isinstance(part, Text) and not part.reasoning])

    @property
    def reasoning(self) -> str:
        """All reasoning, joined; content and calls in between are left out."""
        return "".join([part.text for part in self.parts if isinstance(part, Text) and part.reasoning])

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """The parts of calls."""
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]

    def __bool__(self) -> bool:
        return bool(self.parts)


class OutputParser(Protocol):
    """Parses the text of one choice. However the text is cut into pieces, the joined result is the same."""

    def push(self, text: str) -> ParsedDelta:
        """What the new text means, as far as it can be decided. Never raises: malformed output is content."""
        ...

    def finish(self) -> ParsedDelta:
        """The rest, once no more text follows."""
        ...


def unparsed(text: str) -> ParsedDelta:
    """The meaning of new text of a model whose text is all content."""
    return ParsedDelta([Text(text)] if text else [])


def joined(parts: Iterable[Part]) -> ParsedDelta:
    """The parts, with those of one text or call in a row as one."""
    found: list[Part] = []
    for _, same in groupby(parts, lambda part: part.call if isinstance(part, ToolCallDelta) else part[1:]):
        first, *others = same
        if isinstance(first, ToolCallDelta):
            rest = "".join([each.arguments for each in others if isinstance(each, ToolCallDelta)])
            found.append(first._replace(arguments=first.arguments + rest) if rest else first)
        elif text := first.text + "".join([each.text for each in others if isinstance(each, Text)]):
            found.append(first._replace(text=text))
    return ParsedDelta(found)


def parse_parts(parser: OutputParser, text: str) -> ParsedDelta:
    """The parts of a whole answer, each complete."""
    return joined([*parser.push(text).parts, *parser.finish().parts])
