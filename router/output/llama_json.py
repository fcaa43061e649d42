"""Tool calls of Llama 3: the answer is `{"name": ..., "parameters": {...}}`, or several, separated by `;`. Pure.

`<|python_tag|>` may precede them. There is no other marker, so only objects with the name of one of the request's
functions and with arguments are calls.
"""

from __future__ import annotations

from collections.abc import Container

from router.output.json_call import read_call
from router.output.reader import Steps, TextReader
from router.output.writer import OutputWriter

TAG = "<|python_tag|>"


def read_llama_json(names: Container[str], reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and calls of the functions `names` in any order."""
    lead = yield from reader.skip_space()
    while True:
        if (yield from reader.accept(TAG)):
            lead += TAG + (yield from reader.skip_space())
        if not (yield from read_call(reader, writer, names=names, arguments_required=True)):
            writer.content(lead)
            if (yield from reader.until((TAG,), writer.content)) is None:
                return
            lead = TAG + (yield from reader.skip_space())
            continue
        lead = yield from reader.skip_space()
        if (yield from reader.accept(";")):
            lead += ";" + (yield from reader.skip_space())
