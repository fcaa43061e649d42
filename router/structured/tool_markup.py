"""The markup of tool calls: what `router.output` reads, as parts of grammars and of texts. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from router.output import deepseek, harmony, hermes, kimi, llama_json, mistral, pythonic
from router.output.marked_list import APERTUS, COHERE, GRANITE, HUNYUAN, NEMOTRON, PHI4_MINI, ListMarkers
from router.output.tagged import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, Tags

ARGUMENTS = "\0"
"""Placeholder of a function's arguments in a call's markup."""
NAME = "\1"
"""Placeholder of a function's name."""
NUMBER = "\2"
"""Placeholder of the call's number."""


class Keyed(NamedTuple):
    """How one argument is written where arguments are no JSON object, and what stands between two. `tags`: values are plain text
    where that is possible."""

    before_key: tuple[str, ...]
    after_key: tuple[str, ...]
    after_value: tuple[str, ...]
    between: str = ""
    tags: bool = True


class Markup(NamedTuple):
    """How calls are written. The parts are markers, text, and the placeholders."""

    open: tuple[str, ...]
    call: tuple[str, ...]
    between: tuple[str, ...]
    close: tuple[str, ...] = ()
    keyed: Keyed | None = None
    """None: the arguments are a JSON object."""


_JSON_CALL = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")
_DEEPSEEK_V3 = (deepseek.CALL_BEGIN, "function", deepseek.SEPARATOR)
_PYTHON_CALL = (NAME, "(", ARGUMENTS, ")")
_PYTHON = Keyed((), ("=",), (), ", ", tags=False)


def _list(markers: ListMarkers, call: tuple[str, ...] = _JSON_CALL) -> Markup:
    return Markup((markers.starts[0], "["), call, (", ",), ("]", *markers.ends[:1] * (markers is not GRANITE)))


def _tagged(tags: Tags) -> Markup:
    around = "\n" if tags.line_breaks else ""
    keyed = Keyed((tags.before_key,), _spaced(tags.after_key, around), (f"{around}{tags.after_value}", "\n"))
    call = (tags.before_name, NAME, f"{tags.after_name}\n", ARGUMENTS, tags.after_call)
    call = tuple(part for part in call if part)
    if tags.several:
        return Markup((tags.start, "\n"), (*call, "\n"), (), (tags.end,), keyed)
    if tags.before_name:
        call = ("\n", *call, "\n")
    return Markup((tags.start,), (*call, tags.end), ("\n", tags.start), (), keyed)


def _spaced(tags: tuple[str, ...], around: str) -> tuple[str, ...]:
    """The tags behind a key, in lines of their own, and what stands between the last one and the value."""
    parts = [part for tag in tags for part in ("\n", tag)][1:]
    return (*parts[:-1], f"{parts[-1]}{around}")


MARKUP = {
    "hermes": Markup((hermes.START,), ("\n", *_JSON_CALL, "\n", hermes.END), ("\n", hermes.START)),
    "qwen3_coder": _tagged(QWEN3_CODER),
    "qwen3_xml": _tagged(QWEN3_CODER),
    "glm45": _tagged(GLM45),
    "glm47": _tagged(GLM45),
    "seed_oss": _tagged(SEED_OSS),
    "minimax_m2": _tagged(MINIMAX_M2),
    "llama3_json": Markup((), ('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"), ("; ",)),
    "pythonic": Markup(("[",), _PYTHON_CALL, (", ",), ("]",), _PYTHON),
    "llama4_pythonic": Markup((pythonic.START, "["), _PYTHON_CALL, (", ",), ("]", pythonic.END), _PYTHON),
    "olmo3": Markup((pythonic.OLMO3_START,), _PYTHON_CALL, ("\n",), (pythonic.OLMO3_END,), _PYTHON),
    "mistral": Markup((mistral.START, "["), _JSON_CALL, (", ",), ("]",)),
    "mistral_args": Markup((mistral.START,), (NAME, mistral.ARGS, ARGUMENTS), (mistral.START,)),
    "deepseek_v3": Markup(
        (deepseek.BEGIN,),
        (*_DEEPSEEK_V3, NAME, "\n```json\n", ARGUMENTS, "\n```", deepseek.CALL_END),
        ("\n",),
        (deepseek.END,),
    ),
    "deepseek_v31": Markup(
        (deepseek.BEGIN,),
        (deepseek.CALL_BEGIN, NAME, deepseek.SEPARATOR, ARGUMENTS, deepseek.CALL_END),
        (),
        (deepseek.END,),
    ),
    "kimi_k2": Markup(
        (kimi.BEGIN,),
        (kimi.CALL_BEGIN, "functions.", NAME, ":", NUMBER, kimi.ARGUMENTS, ARGUMENTS, kimi.CALL_END),
        (),
        (kimi.END,),
    ),
    "granite": _list(GRANITE),
    "phi4_mini_json": _list(PHI4_MINI),
    "hunyuan_a13b": _list(HUNYUAN),
    "nemotron_json": _list(NEMOTRON),
    "cohere_command3": _list(
        COHERE, ('{"tool_call_id": "', NUMBER, '", "tool_name": "', NAME, '", "parameters": ', ARGUMENTS, "}")
    ),
    "apertus": _list(APERTUS, ('{"', NAME, '": ', ARGUMENTS, "}")),
    "openai": Markup(
        (),
        (harmony.CHANNEL, "commentary to=functions.", NAME, " ", harmony.CONSTRAIN, "json", harmony.MESSAGE, ARGUMENTS),
        (),
    ),
}
"""By the names of `router.output.formats`; `mistral_args`: newer models of Mistral."""
SPACE = r"[ \t\r\n]*"
"""What the parsers skip."""


class Unmarked(NamedTuple):
    """How an answer begins with calls although no marker precedes them."""

    marker: str
    """Calls may also follow this marker, anywhere."""
    begin: str
    """The first call up to its arguments: a regular expression with `NAME`."""
    end: str
    """The text behind its arguments."""
    close: str
    """The text behind the last call."""
    read_as_call: str
    """How a text begins that the parser may take for calls: a regular expression, in which `NAME` is that of any function."""


_PYTHON_LIST = Unmarked(pythonic.START, rf"\n{{0,2}}\[{NAME}\(", ")", "]", rf"\[{SPACE}{NAME}\(")
UNMARKED = {
    "llama3_json": Unmarked(
        llama_json.TAG,
        r'\n{0,2}\{("type": ?"function", ?)?"name": ?"' + NAME + '", ?"parameters": ?',
        "}",
        "",
        r"\{(.|\n)*(\"" + NAME + r"\"|\\u)",
    ),
    "pythonic": _PYTHON_LIST,
    "llama4_pythonic": _PYTHON_LIST,
}
"""The formats in which an answer is a call because of how it begins."""


def written_calls(format_name: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of these calls, each a function's name and its arguments."""
    markup = MARKUP[format_name]
    texts = [
        "".join(_written(part, name, given, markup, str(at)) for part in markup.call)
        for at, (name, given) in enumerate(calls)
    ]
    return "".join([*markup.open, "".join(markup.between).join(texts), *markup.close])


def _written(part: str, name: str, arguments: Mapping[str, Any], markup: Markup, number: str) -> str:
    if part == ARGUMENTS:
        return (
            json.dumps(arguments, ensure_ascii=False) if markup.keyed is None else _keyed_text(arguments, markup.keyed)
        )
    return {NAME: name, NUMBER: number}.get(part, part)


def _keyed_text(arguments: Mapping[str, Any], keyed: Keyed) -> str:
    return keyed.between.join(
        "".join([*keyed.before_key, key, *keyed.after_key, _value_text(value, keyed), *keyed.after_value])
        for key, value in arguments.items()
    )


def _value_text(value: Any, keyed: Keyed) -> str:
    return value if keyed.tags and isinstance(value, str) else json.dumps(value, ensure_ascii=False)
