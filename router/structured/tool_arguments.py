"""The grammar of a function's arguments, in the form of the model's calls. Pure."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

from llguidance import LLMatcher

from common.base.errors import BadRequest
from common.engine.grammar.compile import LIMITS, MAX_SOURCE_CHARS
from router.output.json_values import elements, members, referred_schema, types_of
from router.structured.json_schema import embedded_schema
from router.structured.lark_rules import LarkRules
from router.structured.relaxed import Relaxed
from router.structured.text_values import text_value
from router.structured.tool_markup import Keyed

_NO_KEYWORD = re.compile(r"""[\s=:"'()\[\]{},<>\\/]|^$""")
_NO_KEY = re.compile(r"""[\n<>"]|^\s|\s$|^$""")
_ANY_KEY = r"[^\n<>\"\s]+"
_MAX_KEPT_CHARS = 16_384
"""Whether llguidance takes longer schemas is not remembered."""
_OF_ALL_ARGUMENTS = (
    *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
)
"""Keywords of JSON Schema that tie parameters to each other."""


class Schema(NamedTuple):
    """A function: its name, and the JSON schema of its arguments. `strict`: what no grammar enforces is refused."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool = False


class ArgumentRules:
    """Adds the rules of arguments to a grammar. `relaxed`: notes what was left out, as `FUNCTION.KEYWORD`; None: all functions are
    strict. `keyed`: None if arguments are a JSON object."""

    def __init__(self, lark: LarkRules, keyed: Keyed | None, relaxed: Relaxed | None) -> None:
        self._lark = lark
        self._keyed = keyed
        self._relaxed = relaxed
        self._schema_chars = 0

    def add(self, index: int, function: Schema) -> str:
        """What the arguments of one function may be: the name of a rule. Arguments of a function that is not strict, and whose
        schema cannot be read, may be any.

        Raises: BadRequest.
        """
        kept = None if self._relaxed is None or function.strict else Relaxed()
        before = len(self._lark.rules)
        try:
            found = self._rule(index, object_schema(function), kept)
        except BadRequest:
            if kept is None:
                raise
            del self._lark.rules[before:]
            kept = Relaxed()
            kept.note(["parameters"])
            found = self._rule(index, {"type": "object"}, kept)
        if kept is not None and self._relaxed is not None:
            self._relaxed.note(f"{function.name}.{name}" for name in kept.names)
        return found

    def _rule(self, index: int, schema: dict[str, Any], relaxed: Relaxed | None) -> str:
        if self._keyed is None:
            return self._json(f"arguments_{index}", schema, relaxed)
        return self._keywords(index, schema, self._keyed, relaxed)

    def _json(self, rule: str, schema: dict[str, Any], relaxed: Relaxed | None) -> str:
        try:
            term = embedded_schema(schema, relaxed)
        except BadRequest as error:
            raise BadRequest(f"a function's parameters: {error.message}", param="tools") from error
        self._schema_chars += len(term)
        if self._schema_chars > MAX_SOURCE_CHARS:  # each parameter by itself has a copy of the definitions
            raise BadRequest(f"the parameters take more than {MAX_SOURCE_CHARS} characters of grammar", param="tools")
        if relaxed is not None and (problem := _problem(term)):
            raise BadRequest(problem)
        self._lark.rules.append(f"{rule}: {term}")
        return rule

    def _keywords(self, index: int, schema: dict[str, Any], keyed: Keyed, relaxed: Relaxed | None) -> str:
        """`a=1, b="x"`, or tags: the properties in the schema's order."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if "properties" not in schema:  # pydantic refers to models that contain themselves
            schema = {**shared, **referred_schema(schema, schema)}
        required = _checked_names(schema, relaxed)
        further = schema.get("additionalProperties")
        between = f"{self._lark.part(keyed.between)} " if keyed.between else ""
        if "properties" not in schema and further is not False:
            item = self._any_item(index, shared, members(further), keyed, relaxed)
            return f"({item} ({between}{item})*)?" if between else f"({item})*"
        may_be_empty, some = True, ""
        """Whether the properties so far may all be missing, and the rule for those that contain one."""
        for number, (name, value) in enumerate(members(schema.get("properties")).items()):
            if value is False and name not in required:
                continue
            if value is False:
                raise BadRequest(
                    f"no value fits the required parameter {name[:100]!r}: its schema is false", param="tools"
                )
            if (_NO_KEY if keyed.tags else _NO_KEYWORD).search(name):
                raise BadRequest(f"this model's format has no way to write the parameter {name[:100]!r}", param="tools")
            item = self._item(f"{index}_{number}", name, shared, value, keyed, relaxed)
            ways = [item] if may_be_empty else []
            if some:
                ways.append(f"{some} {between}{item}")
            if name in required:
                may_be_empty = False
            elif some:
                ways.append(some)
            some = f"keywords_{index}_{number}"
            self._lark.rules.append(f"{some}: {' | '.join(ways)}")
        return f"{some}?" if some and may_be_empty else some

    def _item(
        self, number: str, name: str, shared: dict[str, Any], value: Any, keyed: Keyed, relaxed: Relaxed | None
    ) -> str:
        inner = members(value)
        if not keyed.tags:
            rule = self._json(f"value_{number}", {**shared, **inner}, relaxed)
            return f"{json.dumps(f'{name}=', ensure_ascii=False)} {rule}"
        before = self._lark.parts((*keyed.before_key, name, *keyed.after_key))
        return f"{before} {self._text(number, shared, inner, keyed, relaxed)}"

    def _any_item(
        self, index: int, shared: dict[str, Any], inner: dict[str, Any], keyed: Keyed, relaxed: Relaxed | None
    ) -> str:
        """An argument of any name."""
        if not keyed.tags:
            self._lark.rules.append(f"KEYWORD_{index}: /[^\\W\\d]\\w*=/")
            return f"KEYWORD_{index} {self._json(f'value_{index}', {**shared, **inner}, relaxed)}"
        self._lark.rules.append(f"KEY_{index}: /{_ANY_KEY}/")
        opening, after = self._lark.parts(keyed.before_key), self._lark.parts(keyed.after_key)
        return f"{opening} KEY_{index} {after} {self._text(f'{index}_any', shared, inner, keyed, relaxed)}"

    def _text(
        self, number: str, shared: dict[str, Any], inner: dict[str, Any], keyed: Keyed, relaxed: Relaxed | None
    ) -> str:
        """A value between tags, and what follows it."""
        closing, *after = keyed.after_value
        value = text_value(inner, shared, closing.strip(), relaxed)
        ways: list[str] = []
        if value.texts is not None:
            ways.append(self._lark.text_up_to(f"text_{number}", value.texts, closing))
        if value.json_schema is not None:
            rule = self._json(f"value_{number}", {**shared, **value.json_schema}, relaxed)
            ways.append(f"{rule} {self._lark.part(closing)}")
        return f"({' | '.join(ways)}) {self._lark.parts(after)}"


def _problem(term: str) -> str:
    """Why llguidance refuses a term; empty if it takes it."""
    return (_validated if len(term) <= _MAX_KEPT_CHARS else _validated.__wrapped__)(term)


@lru_cache(1024)
def _validated(term: str) -> str:
    return LLMatcher.validate_grammar(f"start: {term}", limits=LIMITS)


def object_schema(function: Schema) -> dict[str, Any]:
    """The schema of a function's arguments. Raises: BadRequest if it is not that of an object."""
    schema = function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "object" not in types_of(schema, "object"):
        raise BadRequest(f"the parameters of {function.name} must be of type object", param="tools")
    return {**schema, "type": "object"}


def _checked_names(schema: dict[str, Any], relaxed: Relaxed | None) -> list[str]:
    """The required names. Leaves out, or refuses, what arguments with a schema of their own would not hold. Raises: BadRequest."""
    listed: Any = schema.get("properties") or {}
    required: Any = schema.get("required") or []
    if not isinstance(listed, dict) or not isinstance(required, list):
        raise BadRequest("a function's parameters: properties must be an object, and required a list", param="tools")
    for name in elements(required):
        if not isinstance(name, str) or name not in listed:
            raise BadRequest(f"this model's format needs the required {str(name)[:100]!r} in properties", param="tools")
    found = [key for key in _OF_ALL_ARGUMENTS if key in schema]
    found += ["$ref"] if '"$ref": "#"' in json.dumps(schema) else []
    if found and relaxed is None:
        within = found == ["$ref"] and "$ref" not in schema
        what = "a $ref to all parameters" if within else f"{found[0]} of all parameters"
        raise BadRequest(f"this model's format cannot hold {what}", param="tools")
    if relaxed is not None:
        relaxed.note(found)
    return elements(required)
