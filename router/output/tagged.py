"""Tool calls with a tag for each parameter, whose value is text. Pure.

    qwen3_coder  <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
    seed_oss     <seed:tool_call>\\n<function=NAME>\\n<parameter=KEY>VALUE</parameter>\\n</function>\\n</seed:tool_call>
    minimax_m2   <minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n</invoke>\\n
                 </minimax:tool_call>
    glm45        <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>

Strings stand as they are, all other values as JSON (or as Python writes them); the function's schema says which.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from router.output.json_values import members, referred_schema
from router.output.parameter_value import STRINGS_ONLY, allowed_kinds, value_json
from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import Functions, OutputWriter

_NAME_END = re.compile(r"[\s<>\"]")
_KEY_END = re.compile(r"[<>\"\n]")


class Tags(NamedTuple):
    """What stands around calls, names, keys and values. White space between tags means nothing."""

    start: str
    end: str
    before_name: str
    after_name: str
    after_call: str
    before_key: str
    after_key: tuple[str, ...]
    after_value: str
    line_breaks: bool = False
    """A line break before and one behind a value are not part of it."""
    several: bool = False
    """Several calls stand between one `start` and `end`."""


QWEN3_CODER = Tags(
    "<tool_call>", "</tool_call>", "<function=", ">", "</function>", "<parameter=", (">",), "</parameter>", True
)
SEED_OSS = QWEN3_CODER._replace(start="<seed:tool_call>", end="</seed:tool_call>", line_breaks=False)
_START, _END = "<minimax:tool_call>", "</minimax:tool_call>"
MINIMAX_M2 = Tags(
    _START, _END, '<invoke name="', '">', "</invoke>", '<parameter name="', ('">',), "</parameter>", several=True
)
GLM45 = Tags("<tool_call>", "</tool_call>", "", "", "", "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>")


def read_tagged(tags: Tags, functions: Functions, reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and calls in any order, for a request with these functions."""
    while (yield from reader.until((tags.start,), writer.content)) is not None:
        opening = tags.start
        while True:
            space = yield from reader.skip_space()
            if not (yield from _read_call(reader, writer, tags, functions)):
                break
            opening = ""
            if not tags.several:
                space = yield from reader.skip_space()
                break
        if opening:
            writer.content(opening + space)
        else:
            yield from reader.accept(tags.end)


def _read_call(reader: TextReader, writer: OutputWriter, tags: Tags, functions: Functions) -> Steps[bool]:
    """Read a call, streaming its arguments. False: the text is not a call, and nothing has been read."""
    name = yield from reader.attempt(_name(reader, tags))
    if name is None:
        return False
    writer.call(name)
    yield from _read_arguments(reader, writer, tags, functions.get(name))
    yield from reader.skip_space()
    yield from reader.accept(tags.after_call)
    return True


def _name(reader: TextReader, tags: Tags) -> Steps[str]:
    """A call up to its parameters: the function's name. Raises: Malformed."""
    yield from reader.expect(tags.before_name)
    name = yield from reader.take_until(_NAME_END)
    yield from reader.expect(tags.after_name)
    yield from reader.skip_space()
    # Where nothing closes a name, a parameter or the end of the call must follow it.
    if not name or (not tags.after_name and not (yield from _is_next(reader, (tags.before_key, tags.end)))):
        raise Malformed
    return name


def _is_next(reader: TextReader, literals: tuple[str, ...]) -> Steps[bool]:
    """Whether one of the texts comes next; nothing is read."""
    for literal in literals:
        if (yield from reader.accept(literal)):
            reader.unread(literal)
            return True
    return False


def _read_arguments(
    reader: TextReader, writer: OutputWriter, tags: Tags, parameters: dict[str, Any] | None
) -> Steps[None]:
    """Read all parameters, as one JSON object. Arguments that the end of the text cuts off stay so."""
    schemas = members(referred_schema(parameters, parameters).get("properties"))
    before = "{"
    while (yield from reader.accept(tags.before_key)):
        key = (yield from reader.take_until(_KEY_END)).strip()
        for tag in tags.after_key:
            yield from reader.skip_space()
            yield from reader.accept(tag)
        writer.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from _read_value(reader, writer, tags, schemas.get(key), parameters)):
            return
        before = ", "
        yield from reader.skip_space()
    writer.arguments("}" if before == ", " else "{}")


def _read_value(reader: TextReader, writer: OutputWriter, tags: Tags, schema: Any, parameters: Any) -> Steps[bool]:
    """Read one value. Strings are passed on as they come. False: the text ended within it."""
    ends = (f"\n{tags.after_value}", tags.after_value) if tags.line_breaks else (tags.after_value,)
    if tags.line_breaks:
        yield from reader.accept("\n")
    if allowed_kinds(schema, parameters) == STRINGS_ONLY:

        def emit(text: str) -> None:
            writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        writer.arguments('"')
        if (yield from reader.until(ends, emit)) is None:
            return False
        writer.arguments('"')
        return True
    parts: list[str] = []
    found = yield from reader.until(ends, parts.append)
    if found is not None:
        writer.arguments(value_json("".join(parts), schema, parameters))
    return found is not None
