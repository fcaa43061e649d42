"""Grammars that make a model call tools: Lark for llguidance, in the markup that the parsers of `router.output` read. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, cast

from common.base.errors import BadRequest
from common.engine.grammar.compile import MAX_SOURCE_CHARS
from router.output import deepseek, harmony, hermes, llama_json, mistral, pythonic
from router.output.reasoning import ReasoningTags
from router.structured.equivalents import referred
from router.structured.json_schema import embedded_schema

_MAX_CALLS = 32
_OTHERWISE = "otherwise"
_ARGUMENTS = "\0"
"""Placeholder of a function's arguments in a call's markup."""
_NAME = "\1"
"""Placeholder of a function's name."""
_LINE_BREAKS = "/\\n{0,2}/"
_ANYTHING = r"(.|\n)*"
_NO_KEYWORD = re.compile(r"""[\s=:"'()\[\]{},<>\\/]|^$""")
_OF_ALL_ARGUMENTS = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "const",
    "enum",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
]
"""Keywords of JSON Schema that tie parameters to each other."""


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
_SPACE = r"[ \t\r\n]*"
"""What the parsers skip."""


class _Unmarked(NamedTuple):
    """How an answer begins with calls although no marker precedes them."""

    marker: str
    """Calls may also follow this marker, anywhere."""
    begin: str
    """The first call up to its arguments: a regular expression with `_NAME`."""
    end: str
    """The text behind its arguments."""
    close: str
    """The text behind the last call."""
    read_as_call: str
    """How a text begins that the parser may take for calls: a regular expression, in which `_NAME` is that of any function."""


_PYTHON = _Unmarked(pythonic.START, rf"\n{{0,2}}\[{_NAME}\(", ")", "]", rf"\[{_SPACE}{_NAME}\(")
_UNMARKED = {
    "llama3_json": _Unmarked(
        llama_json.TAG,
        r'\n{0,2}\{("type": ?"function", ?)?"name": ?"' + _NAME + '", ?"parameters": ?',
        "}",
        "",
        r"\{(.|\n)*(\"" + _NAME + r"\"|\\u)",
    ),
    "pythonic": _PYTHON,
    "llama4_pythonic": _PYTHON,
}
"""The formats in which an answer is a call because of how it begins."""


class Vocabulary(NamedTuple):
    """Look-ups of tokens. `grammar_id`: `Tokenizer.grammar_id`. `token_id`: the id of any token; None if the text is no token."""

    grammar_id: Callable[[str], int | None]
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
    arguments = [lark.arguments(index, each, as_python=as_python) for index, each in enumerate(functions)]
    names = [function.name for function in functions]
    calls = [lark.call(name, each, markup) for name, each in zip(names, arguments, strict=True)]
    lark.rules.append(f"call: {' | '.join(calls)}")
    single = not parallel or format_name == "openai"
    more = "" if single else f"({lark.parts(markup.between)} call){{0,{_MAX_CALLS - 1}}}"
    reasoning = lark.analysis() if format_name == "openai" else lark.before(tags, before)
    called = f"call {more} {lark.parts(markup.close)}"
    if otherwise:
        final = lark.final() if format_name == "openai" else ""
        answer = f"({lark.parts(markup.open)} {called} | {final} @{_OTHERWISE})"
    elif forced:
        answer = f"{lark.parts(markup.open)} {called}"
    elif format_name == "openai":
        answer = f"{lark.messages()} (call | {lark.final()} {_regex(_ANYTHING)})"
    elif format_name in _UNMARKED:
        unmarked = _UNMARKED[format_name]
        first = f"({lark.first_calls(names, arguments, unmarked)}) {more} {lark.parts((unmarked.close,))}"
        other = lark.text_before(unmarked.marker, not_as=unmarked.read_as_call.replace(_NAME, _any_of(names)))
        opened = lark.parts([part for part in markup.open if part != unmarked.marker])
        answer = f"({first} | {other} {opened} {called} | OTHER_TEXT)"
    else:
        answer = f"({lark.text_before(markup.open[0])} {lark.parts(markup.open[1:])} {called} | OTHER_TEXT)"
    source = "\n".join([f"start: {reasoning} {answer}", *lark.rules, ""])
    return _joined(source, otherwise) if otherwise else source


def final_grammar(answer: str, vocabulary: Vocabulary) -> str:
    """The source of a grammar under which gpt-oss may reason first and then follows the grammar `answer` on its final channel."""
    lark = _Lark(vocabulary)
    return _joined("\n".join([f"start: {lark.analysis()} {lark.final()} @{_OTHERWISE}", *lark.rules, ""]), answer)


def _joined(lark: str, otherwise: str) -> str:
    """Two grammars in one; `otherwise` is Lark or llguidance's list of one grammar."""
    other = json.loads(otherwise)["grammars"][0] if otherwise.startswith("{") else {"lark_grammar": otherwise}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**other, "name": _OTHERWISE}]})


class _Lark:
    """The rules of one grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.rules = ["KEYWORD: /[^\\W\\d]\\w*=/"]
        self._schema_chars = 0

    def parts(self, parts: Sequence[str]) -> str:
        """Markers and text, one after the other."""
        return " ".join(map(self._part, parts))

    def _part(self, text: str) -> str:
        special = self._vocabulary.grammar_id(text)
        return json.dumps(text, ensure_ascii=False) if special is None else f"<[{special}]>"

    def arguments(self, index: int, function: Schema, *, as_python: bool) -> str:
        """What a function's arguments may be."""
        schema = _object_schema(function)
        return self._keywords(index, schema) if as_python else self._json(f"arguments_{index}", schema)

    def call(self, name: str, arguments: str, markup: _Markup) -> str:
        """One function's call."""
        return " ".join(
            arguments if part == _ARGUMENTS else self._part(name if part == _NAME else part) for part in markup.call
        )

    def first_calls(self, names: Sequence[str], arguments: Sequence[str], markup: _Unmarked) -> str:
        """The first call of an answer without a marker. What precedes its arguments is one terminal: the lexer must be able
        to go on with `OTHER_TEXT` as long as both are possible."""
        for index, name in enumerate(names):
            self.rules.append(f"BEGIN_{index}: {_regex(markup.begin.replace(_NAME, re.escape(name)))}")
        return " | ".join(f"BEGIN_{index} {each} {self._part(markup.end)}" for index, each in enumerate(arguments))

    def _json(self, rule: str, schema: dict[str, Any]) -> str:
        try:
            term = embedded_schema(schema)
        except BadRequest as error:
            raise BadRequest(f"a function's parameters: {error.message}", param="tools") from error
        self._schema_chars += len(term)
        if self._schema_chars > MAX_SOURCE_CHARS:  # as Python, each parameter has a copy of the definitions
            raise BadRequest(f"the parameters take more than {MAX_SOURCE_CHARS} characters of grammar", param="tools")
        self.rules.append(f"{rule}: {term}")
        return rule

    def _keywords(self, index: int, schema: dict[str, Any]) -> str:
        """`a=1, b="x"`: the properties in the schema's order. The values are JSON, which the parser of literals reads."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if "properties" not in schema:  # pydantic refers to models that contain themselves
            schema = {**shared, **referred(schema, schema)}
        _check_keywords(schema)
        required = schema.get("required") or ()
        further = schema.get("additionalProperties")
        if "properties" not in schema and further is not False:
            value = self._json(f"value_{index}", {**shared, **further} if isinstance(further, dict) else {})
            return f'(KEYWORD {value} (", " KEYWORD {value})*)?'
        may_be_empty, some = True, ""
        """Whether the properties so far may all be missing, and the rule for those that contain one."""
        for number, (name, value) in enumerate(cast("dict[str, Any]", schema.get("properties") or {}).items()):
            if value is False and name not in required:
                continue
            if value is False:
                raise BadRequest(
                    f"no value fits the required parameter {name[:100]!r}: its schema is false", param="tools"
                )
            if _NO_KEYWORD.search(name):
                raise BadRequest(f"this model's format has no way to write the parameter {name[:100]!r}", param="tools")
            inner = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
            rule = self._json(f"value_{index}_{number}", {**shared, **inner})
            item = f"{json.dumps(f'{name}=', ensure_ascii=False)} {rule}"
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

    def text_before(self, marker: str, *, not_as: str = "") -> str:
        """Any text up to the first marker, and the marker. Adds the rule of texts without it, too.

        `not_as`: a regular expression; no text may begin so.
        """
        text = _regex(_ANYTHING) + (f" & ~{_regex(_SPACE + not_as + _ANYTHING)}" if not_as else "")
        if self._vocabulary.grammar_id(marker) is not None:
            self.rules.append(f"OTHER_TEXT: {text}")
            return f"OTHER_TEXT {self._part(marker)}"
        anywhere = _regex(_ANYTHING + re.escape(marker) + _ANYTHING)
        self.rules += [
            f"TEXT: {text}",
            f"OTHER_TEXT: TEXT & ~{anywhere}",
            f"to_call[suffix={self._part(marker)}]: TEXT",
        ]
        return "to_call"

    def analysis(self) -> str:
        """The reasoning of gpt-oss, if the model opens it."""
        self.rules.append(f"analysis: {self._message('analysis')}")
        return "analysis?"

    def final(self) -> str:
        """What precedes the answer of gpt-oss."""
        return self.parts((harmony.CHANNEL, "final", harmony.MESSAGE))

    def messages(self) -> str:
        """What gpt-oss may write after its first reasoning and before a call or the answer."""
        self.rules.append(f"commentary: {self._message('commentary')}")
        return "(analysis | commentary)*"

    def _message(self, channel: str) -> str:
        opening = self.parts((harmony.CHANNEL, channel, harmony.MESSAGE))
        return f"{opening} /(.|\\n)*/ {self.parts((harmony.END, harmony.START, 'assistant'))}"

    def before(self, tags: ReasoningTags | None, before: Before) -> str:
        """Reasoning between tags."""
        if tags is None or before is Before.NOTHING:
            return ""
        if before is Before.LINE_BREAKS:
            return _LINE_BREAKS
        if self._vocabulary.grammar_id(tags.close) is None:
            self.rules.append(f"thoughts[suffix={self._part(tags.close)}]: /(.|\\n)*/")
        else:
            self.rules.append(f"thoughts: /(.|\\n)*/ {self._part(tags.close)}")
        if before is Before.REST_OF_REASONING:
            return f"thoughts {_LINE_BREAKS}"
        return f"({self._part(tags.open)} thoughts {_LINE_BREAKS})?"


def _regex(pattern: str) -> str:
    return f"/{pattern.replace('/', chr(92) + '/')}/"


def _any_of(names: Sequence[str]) -> str:
    return f"({'|'.join(map(re.escape, names))})"


def _object_schema(function: Schema) -> dict[str, Any]:
    schema = function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise BadRequest(f"the parameters of {function.name} must be of type object", param="tools")
    return {**schema, "type": "object"}


def _check_keywords(schema: dict[str, Any]) -> None:
    """Refuse what Python's keyword arguments, each with a schema of its own, would not hold."""
    listed: Any = schema.get("properties") or {}
    required: Any = schema.get("required") or []
    if not isinstance(listed, dict) or not isinstance(required, list):
        raise BadRequest("a function's parameters: properties must be an object, and required a list", param="tools")
    for name in cast("list[Any]", required):
        if not isinstance(name, str) or name not in listed:
            raise BadRequest(f"this model's format needs the required {str(name)[:100]!r} in properties", param="tools")
    for key in _OF_ALL_ARGUMENTS:
        if key in schema:
            raise BadRequest(f"this model's format cannot hold {key} of all parameters", param="tools")
    if '"$ref": "#"' in json.dumps(schema):
        raise BadRequest("this model's format cannot hold a $ref to all parameters", param="tools")
