"""A whole answer, parsed at once or delta by delta."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.output.base import OutputParser, ParsedDelta, ToolCallDelta, parse_parts


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
    parsed = parse_parts(parser, text)
    return ParsedMessage(parsed.content, parsed.reasoning, parsed.tool_calls)
