"""The answers of gpt-oss: messages on channels. Pure.

    <|channel|>analysis<|message|>...<|end|>                                                    reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>  a tool call
    <|start|>assistant<|channel|>final<|message|>...<|return|>                                  content

The recipient may also stand before the channel. Commentary without one is content: what the model says before a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial

from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import Format, OutputWriter

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
TURN = f"{START}assistant"
"""The end of a prompt that asks for an answer."""
_TO = "to="
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([-.\w]+)")


def harmony(names: Collection[str]) -> Format:
    """The format, for a request with functions of these names; without any, a call's arguments are content."""
    return partial(_read_harmony, calls=bool(names))


def _read_harmony(reader: TextReader, writer: OutputWriter, *, calls: bool) -> Steps[None]:
    """Messages; text outside of them is content. The prompt ends with `<|start|>assistant`, so that the first recipient may come
    without a marker.
    """
    reader.mark()
    yield from reader.skip_space()
    if (yield from reader.accept(_TO)):
        yield from _read_message(reader, writer, _TO, calls)
    else:
        reader.rewind()
    while (marker := (yield from reader.until((START, CHANNEL), writer.content))) is not None:
        reader.mark()
        if not (yield from _read_message(reader, writer, marker, calls)):
            writer.content(marker)


def _read_message(reader: TextReader, writer: OutputWriter, opening: str, calls: bool) -> Steps[bool]:
    """Read the rest of a message's header, and its body. False: there is none; the reader is back at its mark."""
    try:
        header, _ = yield from reader.text_until((MESSAGE,))
        reader.release()
    except Malformed:
        reader.rewind()
        return False
    yield from _read_body(reader, writer, opening + header, calls)
    return True


def _read_body(reader: TextReader, writer: OutputWriter, header: str, calls: bool) -> Steps[None]:
    writer.message()
    channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
    ends = (END, CALL, RETURN, START)
    if function is not None and calls:
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
