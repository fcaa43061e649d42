"""The answers of gpt-oss: messages on channels. Pure.

    <|channel|>analysis<|message|>...<|end|>                                                    reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>  a tool call
    <|start|>assistant<|channel|>final<|message|>...<|return|>                                  content

The recipient may also stand before the channel. Commentary without one is content: what the model says before a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import OutputWriter

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
TURN = f"{START}assistant"
"""The end of a prompt that asks for an answer."""
_TO = "to="
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([-.\w]+)")


def read_harmony(names: Collection[str], reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Messages; text outside of them is content, and without functions a call's arguments, too. The prompt ends with
    `<|start|>assistant`, so that the first recipient may come without a marker.
    """
    calls = bool(names)
    header = yield from reader.attempt(_first_header(reader))
    if header is not None:
        yield from _read_body(reader, writer, header, calls)
    while (marker := (yield from reader.until((START, CHANNEL), writer.content))) is not None:
        header = yield from reader.attempt(_rest_of_header(reader))
        if header is None:
            writer.content(marker)
        else:
            yield from _read_body(reader, writer, marker + header, calls)


def _first_header(reader: TextReader) -> Steps[str]:
    """The header of a message that begins with its recipient. Raises: Malformed."""
    yield from reader.skip_space()
    yield from reader.expect(_TO)
    return _TO + (yield from _rest_of_header(reader))


def _rest_of_header(reader: TextReader) -> Steps[str]:
    """The text up to a message's body. Raises: Malformed when the text ends before."""
    parts: list[str] = []
    if (yield from reader.until((MESSAGE,), parts.append)) is None:
        raise Malformed
    return "".join(parts)


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
