"""Grammars that make a model call tools: Lark for llguidance, in the markup that the parsers of `router.output` read. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, cast

from common.base.errors import BadRequest
from router.output import deepseek, harmony, hermes, mistral, pythonic
from router.output.reasoning import ReasoningTags
from router.structured.json_schema import embedded_schema

_MAX_CALLS = 32
_OTHERWISE = "otherwise"
_ARGUMENTS = "\0"
"""Stands for a function's arguments in a call's markup."""
_NAME = "\1"
"""Stands for a function's name."""
_LINE_BREAKS = "/\\n{0,2}/"
_KEYWORD = re.compile(r"[-.\w]+")


class Schema(NamedTuple):
    """A function: its name, and the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any] | None


class _Markup(NamedTuple):
    """How calls are written. The parts are markers, text, `_NAME` and `_ARGUMENTS`."""

    open: tuple[str, ...]
    call: tuple[str, ...]
    between: tuple[str, ...]
    close: tuple[str, ...] = ()


_JSON_CALL = ('{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, "}")
_PYTHON_CALL = (_NAME, "(", _ARGUMENTS, ")")
_MARKUP = {
    "hermes": _Markup(
        (hermes.START,), ("\n", *_JSON_CALL, "\n", hermes.END), ("\n", hermes.START)
    ),
    "llama3_json": _Markup((), ('{"name": "', _NAME, '", "parameters": ', _ARGUMENTS, "}"), ("; ",)),
    "pythonic": _Markup(("[",), _PYTHON_CALL, (", ",), ("]",)),
    "llama4_pythonic": _Markup((pythonic.START, "["), _PYTHON_CALL, (", ",), ("]", pythonic.END)),
    "mistral": _Markup((mistral.START, "["), _JSON_CALL, (", ",), ("]",)),
    "mistral_args": _Markup((mistral.START,), (_NAME, mistral.ARGS, _ARGUMENTS), (mistral.START,)),
    "deepseek_v3": _Markup(
        (deepseek.BEGIN,),
        (deepseek.CALL_BEGIN, "function", deepseek.SEPARATOR, _NAME, "\n```json\n", _ARGUMENTS, "\n```", deepseek.CALL_END),
        ("\n",),
        (deepseek.END,),
    ),
    "deepseek_v31": _Markup(
        (deepseek.BEGIN,),
        (deepseek.CALL_BEGIN, _NAME, deepseek.SEPARATOR, _ARGUMENTS, deepseek.CALL_END),
        (),
        (deepseek.END,),
    ),
    "openai": _Markup(
        (),
        (harmony.CHANNEL, "commentary to=functions.", _NAME, " ", harmony.CONSTRAIN, "json", harmony.MESSAGE, _ARGUMENTS),
        (),
    ),
}  # fmt: skip
_ALWAYS_MARKED = frozenset({"hermes", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31"})
"""The formats in which every call follows the first marker."""


class Vocabulary(NamedTuple):
    """`special_id`: the id of a special token. `token_id`: that of any token. None: the text is none."""

    special_id: Callable[[str], int | None]
    token_id: Callable[[str], int | None]


class Before(Enum):
    """What the answer has before the calls."""

    NOTHING = auto()
    LINE_BREAKS = auto()
    """The grammar begins behind the reasoning."""
    REASONING = auto()
    """Reasoning, if the model opens it."""
    REST_OF_REASONING = auto()
    """The prompt opened it."""


def can_constrain_choice(format_name: str) -> bool:
    """Whether `tool_grammar` has a grammar with `forced=False`."""
    return format_name in _ALWAYS_MARKED


def tool_grammar(
    format_name: str,
    functions: Sequence[Schema],
    vocabulary: Vocabulary,
    *,
    parallel: bool,
    forced: bool = True,
    otherwise: str = "",
    tags: ReasoningTags | None = None,
    before: Before = Before.NOTHING,
) -> str:
    """The source of a grammar under which the model calls at least one of `functions`, or, unless `forced`, writes any
    text in which all calls are such, or, if there is one, follows the grammar `otherwise` instead.

    `format_name`: of `router.output.formats`. `tags`: those of the model's reasoning.
    Raises: BadRequest when a function's schema is not that of an object.
    """
    if format_name == "mistral" and vocabulary.token_id(mistral.ARGS) is not None:
        format_name = "mistral_args"
    markup = _MARKUP[format_name]
    lark = _Lark(vocabulary)
    as_python = "pythonic" in format_name
    calls = [lark.call(index, each, markup, as_python=as_python) for index, each in enumerate(functions)]
    lark.rules.append(f"call: {' | '.join(calls)}")
    single = not parallel or format_name == "openai"
    more = "" if single else f"({lark.parts(markup.between)} call){{0,{_MAX_CALLS - 1}}}"
    reasoning = lark.analysis() if format_name == "openai" else lark.before(tags, before)
    called = f"call {more} {lark.parts(markup.close)}"
    if otherwise:
        final = lark.parts((harmony.CHANNEL, "final", harmony.MESSAGE)) if format_name == "openai" else ""
        answer = f"({lark.parts(markup.open)} {called} | {final} @{_OTHERWISE})"
    elif forced:
        answer = f"{lark.parts(markup.open)} {called}"
    else:
        answer = f"({lark.text_before(markup.open[0])} {lark.parts(markup.open[1:])} {called} | OTHER_TEXT)"
    source = "\n".join([f"start: {reasoning} {answer}", *lark.rules, ""])
    return _joined(source, otherwise) if otherwise else source


def _joined(lark: str, otherwise: str) -> str:
    """Two grammars in one; `otherwise` is Lark or llguidance's list of one grammar."""
    other = json.loads(otherwise)["grammars"][0] if otherwise.startswith("{") else {"lark_grammar": otherwise}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**other, "name": _OTHERWISE}]})


class _Lark:
    """The rules of one grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.rules: list[str] = []

    def parts(self, parts: Sequence[str]) -> str:
        """Markers and text, one after the other."""
        return " ".join(map(self._part, parts))

    def _part(self, text: str) -> str:
        special = self._vocabulary.special_id(text)
        return json.dumps(text, ensure_ascii=False) if special is None else f"<[{special}]>"

    def call(self, index: int, function: Schema, markup: _Markup, *, as_python: bool) -> str:
        """The name of a rule for one function's call."""
        schema = _object_schema(function)
        arguments = self._keywords(index, schema) if as_python else self._json(f"arguments_{index}", schema)
        parts = [
            arguments if part == _ARGUMENTS else self._part(function.name if part == _NAME else part)
            for part in markup.call
        ]
        self.rules.append(f"call_{index}: {' '.join(parts)}")
        return f"call_{index}"

    def _json(self, rule: str, schema: dict[str, Any]) -> str:
        try:
            self.rules.append(f"{rule}: {embedded_schema(schema)}")
        except BadRequest as error:
            raise BadRequest(f"a function's parameters: {error.message}", param="tools") from error
        return rule

    def _keywords(self, index: int, schema: dict[str, Any]) -> str:
        """`a=1, b="x"`: the properties in the schema's order. The values are JSON, which the parser of literals reads."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = schema.get("required") or ()
        may_be_empty, some = True, ""
        """Whether the properties so far may all be missing, and the rule for those that contain one."""
        for number, (name, value) in enumerate(cast("dict[str, Any]", schema.get("properties") or {}).items()):
            if not _KEYWORD.fullmatch(name):
                raise BadRequest(f"this model's format has no way to write the parameter {name[:100]!r}", param="tools")
            inner = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
            rule = self._json(f"value_{index}_{number}", {**shared, **inner})
            item = f'"{name}=" {rule}'
            ways = [item] if may_be_empty else []
            if some:
                ways.append(f'{some} ", " {item}')
            if name in required:
                may_be_empty = False
            elif some:
                ways.append(some)
            some = f"keywords_{index}_{number}"
            self.rules.append(f"{some}: {' | '.join(ways)}")
        return f"{some}?" if some and may_be_empty else some

    def text_before(self, marker: str) -> str:
        """Any text up to the first marker, and the marker. Adds the rule of texts without it, too."""
        if self._vocabulary.special_id(marker) is not None:
            self.rules.append("OTHER_TEXT: /(.|\\n)*/")
            return f"OTHER_TEXT {self._part(marker)}"
        anywhere = f"/(.|\\n)*{re.escape(marker).replace('/', chr(92) + '/')}(.|\\n)*/"
        self.rules += [f"OTHER_TEXT: /(.|\\n)*/ & ~{anywhere}", f"to_call[suffix={self._part(marker)}]: /(.|\\n)*/"]
        return "to_call"

    def analysis(self) -> str:
        """The reasoning of gpt-oss, if the model opens it."""
        self.rules.append(
            f'analysis: {self._part(harmony.CHANNEL)} "analysis" {self._part(harmony.MESSAGE)} /(.|\\n)*/ '
            f'{self._part(harmony.END)} {self._part(harmony.START)} "assistant"'
        )
        return "analysis?"

    def before(self, tags: ReasoningTags | None, before: Before) -> str:
        """Reasoning between tags."""
        if tags is None or before is Before.NOTHING:
            return ""
        if before is Before.LINE_BREAKS:
            return _LINE_BREAKS
        if self._vocabulary.special_id(tags.close) is None:
            self.rules.append(f"thoughts[suffix={self._part(tags.close)}]: /(.|\\n)*/")
        else:
            self.rules.append(f"thoughts: /(.|\\n)*/ {self._part(tags.close)}")
        if before is Before.REST_OF_REASONING:
            return f"thoughts {_LINE_BREAKS}"
        return f"({self._part(tags.open)} thoughts {_LINE_BREAKS})?"


def _object_schema(function: Schema) -> dict[str, Any]:
    schema = function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise BadRequest(f"the parameters of {function.name} must be of type object", param="tools")
    return {**schema, "type": "object"}
