"""Tool calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer models write
`[TOOL_CALLS]name[ARGS]{...}` for each call. Pure."""

from __future__ import annotations

import re
import secrets
import string

from router.output.json_call import read_call, read_headed_call, read_list
from router.output.reader import Malformed, Steps, TextReader
from router.output.writer import OutputWriter

START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NOT_NAME = re.compile(r"[^-.\w]")
_ID_CHARS = string.ascii_letters + string.digits


def mistral_call_id() -> str:
    """A new id; Mistral's templates accept only nine letters and digits."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


def read_mistral(reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and calls in any order."""
    while (yield from reader.until((START,), writer.content)) is not None:
        opening = START + (yield from reader.skip_space())
        if (yield from reader.accept("[")):
            yield from read_list(reader, writer, opening + "[")
        elif not (
            (yield from read_call(reader, writer)) or (yield from read_headed_call(reader, writer, _head(reader)))
        ):
            writer.content(opening)


def _head(reader: TextReader) -> Steps[tuple[str, None]]:
    """A call up to its arguments: the function's name. Raises: Malformed."""
    name = yield from reader.take_until(_NOT_NAME)
    yield from reader.skip_space()
    if (yield from reader.accept(CALL_ID)):
        yield from reader.take_until(_NOT_NAME)
    yield from reader.accept(ARGS)
    yield from reader.skip_space()
    if not name or (yield from reader.peek()) != "{":
        raise Malformed
    return name, None
