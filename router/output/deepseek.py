"""Tool calls of DeepSeek V3, R1 and V3.1. Pure.

    V3    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
    V3.1  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

All calls stand between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.
"""

from __future__ import annotations

import re

from router.output.json_call import read_arguments, read_section
from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import OutputWriter

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"
_NAME_END = re.compile(r"[\s<`{]")


def read_deepseek(reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and calls in any order, in both forms."""
    return read_section(reader, writer, BEGIN, END, _read_call)


def _read_call(reader: TextReader, writer: OutputWriter) -> Steps[bool]:
    head = yield from reader.attempt(_head(reader))
    if head is None:
        return False
    name, fenced = head
    writer.call(name)
    yield from read_arguments(reader, writer)
    yield from reader.skip_space()
    if fenced:
        yield from reader.accept(_FENCE)
    yield from reader.skip_space()
    yield from reader.accept(CALL_END)
    return True


def _head(reader: TextReader) -> Steps[tuple[str, bool]]:
    """A call up to its arguments: the function's name, and whether a fence precedes them. Raises: Malformed."""
    yield from reader.expect(CALL_BEGIN)
    name = yield from reader.take_until(_NAME_END)
    yield from reader.expect(SEPARATOR)
    fenced = False
    if (yield from reader.peek()) != "{":
        name = yield from reader.take_until(_NAME_END)
        yield from reader.skip_space()
        fenced = yield from reader.accept(_FENCE + "json")
        yield from reader.skip_space()
    if not name or (yield from reader.peek()) != "{":
        raise Malformed
    return name, fenced
