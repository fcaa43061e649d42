"""Tool calls as a JSON list behind a marker. Pure.

granite          <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
phi4_mini_json   the same, and <|/tool_call|> or `functools[...]`
hunyuan_a13b     <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>
cohere_command3  <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>
nemotron_json    <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>
apertus          <|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>
"""

from __future__ import annotations

from typing import NamedTuple

from router.output.json_call import read_call, read_list, read_named_object
from router.output.reader import Steps, TextReader
from router.output.writer import OutputWriter


class ListMarkers(NamedTuple):
    """`starts`: each of them may precede the list; `ends`: may follow it. `keyed`: a call is an object with the function's name
    as its only key."""

    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    keyed: bool = False


GRANITE = ListMarkers(("<|tool_call|>", "<tool_call>"), ("</tool_call>",))
PHI4_MINI = ListMarkers(("<|tool_call|>", "functools"), ("<|/tool_call|>",))
HUNYUAN = ListMarkers(("<tool_calls>",), ("</tool_calls>",))
COHERE = ListMarkers(("<|START_ACTION|>",), ("<|END_ACTION|>",))
NEMOTRON = ListMarkers(("<TOOLCALL>",), ("</TOOLCALL>",))
APERTUS = ListMarkers(("<|tools_prefix|>",), ("<|tools_suffix|>",), keyed=True)


def read_marked(markers: ListMarkers, reader: TextReader, writer: OutputWriter) -> Steps[None]:
    """Content and lists behind these markers, in any order. A single call without a list is read, too."""
    read_one = read_named_object if markers.keyed else read_call
    while (start := (yield from reader.until(markers.starts, writer.content))) is not None:
        opening = start + (yield from reader.skip_space())
        if (yield from reader.accept("[")):
            yield from read_list(reader, writer, opening + "[", read_one)
        elif not (yield from read_one(reader, writer)):
            writer.content(opening)
            continue
        space = yield from reader.skip_space()
        for end in markers.ends:
            if (yield from reader.accept(end)):
                space = ""
        writer.content(space)
