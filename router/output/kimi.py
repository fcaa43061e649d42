"""Tool calls of Kimi K2. Pure.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

`functions.NAME:0` is the call's id, with its number in the conversation: the template shows it again.
"""

from __future__ import annotations

import re

from router.output.json_call import read_headed_call, read_section
from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import OutputWriter

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = (BEGIN, END, CALL_BEGIN, ARGUMENTS, CALL_END)
_ID_END = re.compile(r"[\s<{]")


def read_kimi(reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and calls in any order."""
    return read_section(reader, writer, BEGIN, END, _read_call)


def _read_call(reader: TextReader, writer: OutputWriter) -> Steps[bool]:
    return read_headed_call(reader, writer, _head(reader), CALL_END)


def _head(reader: TextReader) -> Steps[tuple[str, str | None]]:
    """A call up to its arguments: the function's name and the call's id. Raises: Malformed."""
    yield from reader.expect(CALL_BEGIN)
    yield from reader.skip_space()
    call_id = yield from reader.take_until(_ID_END)
    name = call_id.removeprefix("functions.").partition(":")[0]
    yield from reader.skip_space()
    yield from reader.expect(ARGUMENTS)
    yield from reader.skip_space()
    if not name or (yield from reader.peek()) != "{":
        raise Malformed
    return name, call_id if ":" in call_id else None
