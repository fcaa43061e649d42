"""Tool calls of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Pure."""

from __future__ import annotations

from router.output.json_call import read_call
from router.output.reader import Steps, TextReader
from router.output.writer import OutputWriter

START, END = "<tool_call>", "</tool_call>"


def read_hermes(reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and calls in any order."""
    while (yield from reader.until((START,), writer.content)) is not None:
        space = yield from reader.skip_space()
        if not (yield from read_call(reader, writer)):
            writer.content(START + space)
            continue
        yield from reader.skip_space()
        yield from reader.accept(END)
