"""The answers of gpt-oss: messages on channels. Pure.

    <|channel|>analysis<|message|>...<|end|>                                                    reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>  a tool call
    <|start|>assistant<|channel|>final<|message|>...<|return|>                                  content

The recipient may also stand before the channel. Commentary without one is content: what the model says before a call.
"""

from __future__ import annotations

import re

from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import OutputWriter

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([-.\w]+)")


def read_harmony(reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Messages; text outside of them is content."""
    while True:
        marker = yield from reader.until((START, CHANNEL), writer.content)
        if marker is None:
            return
        reader.mark()
        try:
            header, _ = yield from reader.text_until((MESSAGE,))
            reader.release()
        except Malformed:
            reader.rewind()
            writer.content(marker)
            continue
        yield from _read_body(reader, writer, marker + header)


def _read_body(reader: TextReader, writer: OutputWriter, header: str) -> Steps[None]:
    channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
    ends = (END, CALL, RETURN, START)
    if function is not None:
        writer.call(function[1])
        some = False

        def arguments(text: str) -> None:
            nonlocal some
            some = some or not text.isspace()
            writer.arguments(text)

        end = yield from reader.until(ends, arguments)
        if not some:
            writer.arguments("{}")
    elif channel is not None and channel[1] == "analysis":
        end = yield from reader.until(ends, writer.reasoning)
    else:
        end = yield from reader.until(ends, writer.content)
    if end == START:
        reader.unread(START)
