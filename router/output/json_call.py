"""Tool calls as JSON objects, alone or in a list: `{"name": ..., "arguments": {...}}`. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from typing import Any

from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import OutputWriter

ReadCall = Callable[[TextReader, OutputWriter], Steps[bool]]
"""Reads a call. False: the text is not a call, and nothing has been read."""
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None


class _Call:
    """What is known of one call while its object is read."""

    def __init__(self, reader: TextReader, writer: OutputWriter, names: Container[str] | None) -> None:
        self._reader = reader
        self._writer = writer
        self._names = names
        self._name: str | None = None
        self._early: list[str] | None = None
        """Arguments that came before the name."""
        self.begun = False

    def read(self) -> Steps[None]:
        """Read the members of the object, and its end. Raises: Malformed."""
        reader = self._reader
        yield from reader.expect("{")
        while True:
            yield from reader.skip_space()
            key = _loads((yield from self._value()))
            yield from reader.skip_space()
            yield from reader.expect(":")
            yield from reader.skip_space()
            if key in _ARGUMENTS and not self.begun and self._early is None:
                yield from self._read_arguments()
            else:
                value = yield from self._value()
                if key in _NAMES and self._name is None:
                    self._take_name(_loads(value))
            yield from reader.skip_space()
            if not (yield from reader.accept(",")):
                yield from reader.expect("}")
                if self.begun:
                    reader.release()
                return

    def begin(self) -> None:
        """Report the call. Raises: Malformed when it has no name."""
        if self._name is None:
            raise Malformed
        self._reader.release()
        self._writer.call(self._name)
        self.begun = True

    def _give(self, arguments: str) -> None:
        self.begin()
        self._writer.arguments(arguments)
        self._reader.mark()

    def _take_name(self, name: Any) -> None:
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            raise Malformed
        self._name = name
        if self._early is not None:
            self._give("".join(self._early))

    def _read_arguments(self) -> Steps[None]:
        first = yield from self._reader.peek()
        if first == "{":
            if self._name is None:
                self._early = []
                yield from self._reader.json_value(self._early.append)
            else:
                self.begin()
                yield from self._reader.json_value(self._writer.arguments)
                self._reader.mark()
            return
        # Some models write the object as a string, or null.
        value = _loads((yield from self._value()))
        if value is not None and not isinstance(value, str):
            raise Malformed
        self._early = [value or "{}"]
        if self._name is not None:
            self._give(value or "{}")

    def _value(self) -> Steps[str]:
        parts: list[str] = []
        yield from self._reader.json_value(parts.append)
        return "".join(parts)


def read_call(
    reader: TextReader, writer: OutputWriter, *, names: Container[str] | None = None, arguments_required: bool = False
) -> Steps[bool]:
    """Read a call, streaming its arguments. False: the text is not a call, and nothing has been read.

    If the object is malformed behind the arguments, the call ends with them; if within them, there.
    `names`: only these functions count. `arguments_required`: an object without arguments is no call.
    """
    call = _Call(reader, writer, names)
    reader.mark()
    try:
        yield from call.read()
        if not call.begun:
            if arguments_required:
                raise Malformed
            call.begin()
            writer.arguments("{}")
    except Malformed:
        reader.rewind()
    return call.begun


def read_arguments(reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Read the arguments of the last call. They end where they are malformed."""
    try:
        yield from reader.json_value(writer.arguments)
    except Malformed:
        return


def read_named_object(reader: TextReader, writer: OutputWriter) -> Steps[bool]:
    """Read a call of the form `{NAME: {...}}`. False: the text is not a call, and nothing has been read."""
    return (yield from read_headed_call(reader, writer, _key(reader), "}"))


def read_headed_call(
    reader: TextReader, writer: OutputWriter, head: Steps[tuple[str, str | None]], end: str = ""
) -> Steps[bool]:
    """Read a call that is not a JSON object, whose arguments are one. False: the text is not a call, and nothing has been read.

    `head`: reads a call up to its arguments, and returns the function's name and the call's id. `end`: may follow them.
    """
    found = yield from reader.attempt(head)
    if found is None:
        return False
    writer.call(*found)
    yield from read_arguments(reader, writer)
    if end:
        yield from reader.skip_space()
        yield from reader.accept(end)
    return True


def _key(reader: TextReader) -> Steps[tuple[str, None]]:
    """The beginning of an object up to its first value, which is an object: the key. Raises: Malformed."""
    yield from reader.expect("{")
    yield from reader.skip_space()
    key: list[str] = []
    yield from reader.json_value(key.append)
    name = _loads("".join(key))
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    if not isinstance(name, str) or not name or (yield from reader.peek()) != "{":
        raise Malformed
    return name, None


def read_section(reader: TextReader, writer: OutputWriter, begin: str, end: str, read_one: ReadCall) -> Steps[None]:
    """Content, and calls between `begin` and `end`, in any order. `begin` is content if no call follows."""
    while (yield from reader.until((begin,), writer.content)) is not None:
        opening = begin
        while True:
            space = yield from reader.skip_space()
            if not (yield from read_one(reader, writer)):
                break
            opening = ""
        if opening or not (yield from reader.accept(end)):
            writer.content(opening + space)


def read_list(reader: TextReader, writer: OutputWriter, opening: str, read_one: ReadCall = read_call) -> Steps[None]:
    """Read calls up to the end of their list, behind `opening`, which is content if no call follows."""
    while True:
        opening += yield from reader.skip_space()
        if not (yield from read_one(reader, writer)):
            writer.content(opening)
            return
        opening = yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            if not (yield from reader.accept("]")):
                writer.content(opening)
            return
        opening += ","
