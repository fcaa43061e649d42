"""What generated text means: content, reasoning, tool calls. Pure; runs on the router's event loop, once per delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class ToolCallDelta(NamedTuple):
    """A part of one tool call. A call's first delta has its id and name; the `arguments` of all its deltas, joined, are one
    JSON object."""

    call: int
    """Number of the call in the answer, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ParsedDelta(NamedTuple):
    """The meaning of some new text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class OutputParser(Protocol):
    """Parses the text of one choice. However the text is cut into pieces, the joined result is the same."""

    def push(self, text: str) -> ParsedDelta:
        """What the new text means, as far as it can be decided. Never raises: malformed output is content."""
        ...

    def finish(self) -> ParsedDelta:
        """The rest, once no more text follows."""
        ...


@dataclass
class ParsedMessage:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list[ToolCallDelta])
    """One per call, complete."""

    def add(self, delta: ParsedDelta) -> None:
        """Append a delta."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            if part.call == len(self.tool_calls):
                self.tool_calls.append(part)
            else:
                known = self.tool_calls[part.call]
                self.tool_calls[part.call] = known._replace(arguments=known.arguments + part.arguments)


def parse_whole(parser: OutputParser, text: str) -> ParsedMessage:
    """A whole answer, parsed at once."""
    message = ParsedMessage()
    message.add(parser.push(text))
    message.add(parser.finish())
    return message
