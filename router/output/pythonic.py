"""Tool calls as Python: `[get_weather(city='Paris', days=2), now()]` of Llama 3.2 and Llama 4. Pure.

Only literals are understood, and nothing is evaluated. Llama 4 writes the list between `<|python_start|>` and
`<|python_end|>`; without them, an answer is a list of calls only if it begins with the name of one of the request's
functions. OLMo 3 writes one call in each line between `<function_calls>` and `</function_calls>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

from router.output.python_literal import literal_json
from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import OutputWriter

START, END = "<|python_start|>", "<|python_end|>"
OLMO3_START, OLMO3_END = "<function_calls>", "</function_calls>"
_NAME_END = re.compile(r"[^-.\w]")
_KEYWORD_END = re.compile(r"""[\s=:"'()\[\]{},<>]""")
"""Names of keywords may have marks that are no letters, as those of Hindi have."""
_SPECIAL = re.compile(r"""["'()\[\]{},]""")
_STRING_END = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


def read_pythonic(names: Container[str], reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and lists of calls of the functions `names`, in any order."""
    lead = yield from reader.skip_space()
    while True:
        if (yield from reader.accept(START)):
            lead += START + (yield from reader.skip_space())
        yield from _read_list(reader, writer, names, lead)
        yield from reader.accept(END)
        if (yield from reader.until((START,), writer.content)) is None:
            return
        lead = START + (yield from reader.skip_space())


def _read_list(reader: TextReader, writer: OutputWriter, names: Container[str], lead: str) -> Steps[None]:
    """Read a list of calls; what is not one remains unread, except `lead`, which then is content."""
    reader.mark()
    try:
        yield from reader.expect("[")
        while True:
            yield from _read_call(reader, writer, names)
            lead = ""
            reader.mark()
            yield from reader.skip_space()
            if not (yield from reader.accept(",")):
                yield from reader.expect("]")
                reader.release()
                return
    except Malformed:
        reader.rewind()
        writer.content(lead)


def read_olmo3(names: Container[str], reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and calls of the functions `names` in OLMo 3's format, in any order."""
    while (yield from reader.until((OLMO3_START,), writer.content)) is not None:
        lead = OLMO3_START
        try:
            while True:
                reader.mark()
                yield from _read_call(reader, writer, names)
                lead = ""
        except Malformed:
            reader.rewind()
        lead += yield from reader.skip_space()
        if lead.isspace() or not lead:
            yield from reader.accept(OLMO3_END)
        else:
            writer.content(lead)


def _read_call(reader: TextReader, writer: OutputWriter, names: Container[str]) -> Steps[None]:
    """Read `name(key=value, ...)`. The call is reported with its first complete argument.

    Raises: Malformed; the mark is where the unread text begins, and the arguments so far are complete.
    """
    yield from reader.skip_space()
    name = yield from reader.take_until(_NAME_END)
    if name not in names:
        raise Malformed
    yield from reader.expect("(")
    some = False
    try:
        yield from reader.skip_space()
        while not (yield from reader.accept(")")):
            argument = yield from _argument(reader)
            reader.release()
            if not some:
                writer.call(name)
            writer.arguments((", " if some else "{") + argument)
            some = True
            reader.mark()
            if not (yield from reader.accept(",")):
                yield from reader.expect(")")
                break
            yield from reader.skip_space()
    except Malformed:
        if some:
            writer.arguments("}")
        raise
    reader.release()
    if not some:
        writer.call(name)
    writer.arguments("}" if some else "{}")


def _argument(reader: TextReader) -> Steps[str]:
    """Read `key=value`; the same as a member of a JSON object."""
    key = yield from reader.take_until(_KEYWORD_END)
    yield from reader.skip_space()
    if not key:
        raise Malformed
    yield from reader.expect("=")
    try:
        value = literal_json((yield from _value_text(reader)))
    except ValueError:
        raise Malformed from None
    return f"{json.dumps(key, ensure_ascii=False)}: {value}"


def _value_text(reader: TextReader) -> Steps[str]:
    """Read up to the comma or bracket that ends an argument."""
    parts: list[str] = []
    depth = 0
    while True:
        parts.append((yield from reader.take_until(_SPECIAL)))
        char = yield from reader.peek()
        if depth == 0 and char in (",", ")"):
            return "".join(parts)
        if not (yield from reader.accept(char)) or not char:
            raise Malformed
        parts.append(char)
        if char in _STRING_END:
            yield from _rest_of_string(reader, parts, char)
        elif char != ",":
            depth += 1 if char in "([{" else -1


def _rest_of_string(reader: TextReader, parts: list[str], quote: str) -> Steps[None]:
    while True:
        parts.append((yield from reader.take_until(_STRING_END[quote])))
        char = yield from reader.peek()
        if not char:
            raise Malformed
        yield from reader.expect(char)
        parts.append(char)
        if char == quote:
            return
        escaped = yield from reader.peek()
        yield from reader.accept(escaped)
        parts.append(escaped)
