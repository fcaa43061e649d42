"""The request fields that ask for structured output: OpenAI's, and vLLM's present and former ones. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from common.base.errors import BadRequest
from router.http.body_model import BodyModel
from router.structured.json_schema import MAX_WHITESPACE_CHARS, WHITESPACE, Schema, without_further_properties
from router.structured.relaxed import Relaxed
from router.structured.sources import choice_grammar, regex_grammar, schema_grammar, text_grammar

_ANY_OBJECT: Schema = {"type": "object"}
_Whitespace = Annotated[str, Field(max_length=MAX_WHITESPACE_CHARS)]


_Wanted = list[tuple[str, Callable[[Relaxed], str]]]
"""The fields that ask for a grammar, each with how its source is made; that notes what was left out of a schema."""


class JsonSchemaFormat(BodyModel):
    """`json_schema` of a `response_format`. The answer always follows the schema; `strict` refuses one with keywords that no
    grammar enforces, which are left out otherwise."""

    schema_: Annotated[Schema, Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BodyModel):
    """OpenAI's form. `schema`: of a `json_object`, as llama.cpp and others take it."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None

    @property
    def wanted(self) -> _Wanted:
        if self.type == "text":
            return []
        if self.type == "json_object":
            schema = _ANY_OBJECT if self.schema_ is None else self.schema_
            return [("response_format", lambda relaxed: schema_grammar(schema, WHITESPACE, relaxed))]
        return [("response_format", self._from_schema)]

    def _from_schema(self, relaxed: Relaxed) -> str:
        wanted = self.json_schema
        if wanted is None:
            raise BadRequest("json_schema is missing")
        return schema_grammar(wanted.schema_, WHITESPACE, None if wanted.strict else relaxed)


class StructuredOutputs(BodyModel):
    """vLLM's form; exactly one of the first five."""

    model_config = ConfigDict(extra="forbid")
    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = False
    disable_additional_properties: bool | None = False
    disable_fallback: bool | None = False
    """There is one library only."""
    whitespace_pattern: _Whitespace | None = None

    @property
    def wanted(self) -> _Wanted:
        space = None if self.disable_any_whitespace else self.whitespace_pattern or WHITESPACE
        schema = self.json_
        if isinstance(schema, dict) and self.disable_additional_properties:
            schema = without_further_properties(schema)
        return _wanted(
            "structured_outputs.", schema, self.regex, self.choice, self.grammar, bool(self.json_object), space
        )


class StructuredFields(BodyModel):
    """The fields that ask for a form of the answer; at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: _Whitespace | None = None

    @property
    def has_grammar_text(self) -> bool:
        """Whether the client wrote a grammar, which takes long to read."""
        return self.guided_grammar is not None or (
            self.structured_outputs is not None and self.structured_outputs.grammar is not None
        )

    def grammar_source(self, relaxed: Relaxed) -> tuple[str, str] | None:
        """The field that asks for a grammar, and the grammar's source; None if none does. `relaxed`: notes what was left out.

        Raises: BadRequest naming the field, if it is not supported or several fields ask for one.
        """
        if _ASKING.isdisjoint(self.model_fields_set):
            return None
        space = self.guided_whitespace_pattern or WHITESPACE
        wanted = _wanted(
            "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, False, space
        )
        if self.structured_outputs is not None:
            wanted += self.structured_outputs.wanted
        if self.response_format is not None:
            wanted += self.response_format.wanted
        if not wanted:
            return None
        if len(wanted) > 1:
            names = " and ".join(param for param, _ in wanted)
            raise BadRequest(f"only one of {names} is allowed", param=wanted[1][0].partition(".")[0])
        [(param, make)] = wanted
        try:
            return param, make(relaxed)
        except BadRequest as error:
            raise BadRequest(f"{param}: {error.message}", param=param.partition(".")[0]) from error


_ASKING = frozenset(StructuredFields.model_fields)


def _wanted(
    prefix: str,
    schema: Schema | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    json_object: bool,
    space: str | None,
) -> _Wanted:
    wanted: _Wanted = []
    if schema is not None:
        wanted.append((f"{prefix}json", lambda relaxed: schema_grammar(schema, space, relaxed)))
    if regex is not None:
        wanted.append((f"{prefix}regex", lambda _: regex_grammar(regex)))
    if choice is not None:
        wanted.append((f"{prefix}choice", lambda _: choice_grammar(choice)))
    if grammar is not None:
        wanted.append((f"{prefix}grammar", lambda _: text_grammar(grammar)))
    if json_object:
        wanted.append((f"{prefix}json_object", lambda relaxed: schema_grammar(_ANY_OBJECT, space, relaxed)))
    return wanted
