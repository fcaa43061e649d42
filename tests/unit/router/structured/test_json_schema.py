"""Schemas as grammars: bounded white space, and no keyword is ignored silently."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.base.errors import BadRequest
from common.engine.grammar.compile import MAX_SOURCE_CHARS, compile_grammar, load_tokenizer
from common.model.config import load_model_config
from common.model.hub import resolve_model
from router.structured.json_schema import (
    MAX_SCHEMA_DEPTH,
    embedded_schema,
    json_schema_grammar,
    without_further_properties,
)
from router.structured.relaxed import Relaxed

DEMO = resolve_model("demo")
ROW = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    config = load_model_config(DEMO)
    return load_tokenizer(DEMO, config.vocab_size, config.eos_token_ids)


def accepts(tokenizer: LLTokenizer, source: str, text: str) -> bool:
    matcher = compile_grammar(tokenizer, source).deep_copy()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('{"a":1}', True),
        ('{"a": 1}', True),
        ('{\n\t"a": 1\n}', True),
        ("{\n" + " " * 20 + '"a": 1}', True),
        ('{\n\n"a": 1}', False),
        ("{" + " " * 2 + '"a": 1}', False),
        ('{"a":1} ', False),
        ('{"a":"1"}', False),
        ('{"b":1}', False),
        ('{"a":1,"b":2}', False),
    ],
)
def test_a_schema_admits_its_texts_with_bounded_white_space(tokenizer: LLTokenizer, text: str, accepted: bool) -> None:
    assert accepts(tokenizer, json_schema_grammar(ROW), text) is accepted
    assert accepts(tokenizer, "start: " + embedded_schema(ROW), text) is accepted


def test_white_space_can_be_chosen_or_left_out(tokenizer: LLTokenizer) -> None:
    assert accepts(tokenizer, json_schema_grammar(ROW, None), '{"a":1}')
    assert not accepts(tokenizer, json_schema_grammar(ROW, None), '{"a": 1}')
    assert accepts(tokenizer, json_schema_grammar(ROW, "[ ]{3}"), '{"a":   1}')
    assert not accepts(tokenizer, json_schema_grammar(ROW, "[ ]{3}"), '{"a": 1}')


def test_a_schema_is_embedded_in_a_grammar(tokenizer: LLTokenizer) -> None:
    source = f'start: "<call>" {embedded_schema(ROW)} "</call>"'
    assert accepts(tokenizer, source, '<call>{"a": 1}</call>')


@pytest.mark.parametrize(
    ("schema", "text", "refused"),
    [
        ({"type": "array", "uniqueItems": False, "items": {"type": "string"}}, '["x", "x"]', "[1]"),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": ROW}, '{"x": {"a": 1}}', "[]"),
        ({"type": "object", "dependentRequired": {}, "dependentSchemas": {}, "propertyNames": {}}, "{}", "1"),
        ({"not": False, "propertyNames": True, "type": "boolean"}, "true", "1"),
        ({"anyOf": [{"type": "string", "format": "password"}, {"type": "string", "format": "path"}]}, '"/x"', "1"),
        ({"type": "object", "properties": {"a": {"not": {}, "description": "never"}}}, '{"b": 1}', '{"a": 1}'),
        ({"type": "string", "format": "nanoid", "pattern": "^[a-z]{3}$"}, '"abc"', '"ab"'),
        ({"type": "string", "format": "includes", "allOf": [{"pattern": "q"}]}, '"aqb"', '"ab"'),
        ({"propertyNames": {"enum": ["a", "b"]}, **NUMBERS}, '{"a": 1, "b": 2}', '{"c": 1}'),
        (
            {"propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a"]}}, **NUMBERS},
            '{"a": 1}',
            '{"a": "x"}',
        ),
        ({"propertyNames": {"enum": ["a", "b"]}, "required": ["b"], **NUMBERS}, '{"b": 1}', '{"a": 1}'),
    ],
)
def test_keywords_with_an_equivalent_are_taken(tokenizer: LLTokenizer, schema: Any, text: str, refused: str) -> None:
    source = json_schema_grammar(schema)
    assert accepts(tokenizer, source, text)
    assert not accepts(tokenizer, source, refused)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "propertyNames": {"pattern": "^a", "format": "uri"}}, "propertyNames"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": [1]}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"a": {}}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"enum": ["a"], "minLength": 2}}, "propertyNames"),
        (
            {"propertyNames": {"$ref": "#/$defs/E", "maxLength": 1}, "$defs": {"E": {"enum": ["a", "bc"]}}},
            "propertyNames",
        ),
        ({"type": "string", "format": "unheard-of"}, "unheard-of"),
        ({"type": "string", "format": "unheard-of", "allOf": [{"minLength": 1}]}, "unheard-of"),
        ({"type": "string", "format": "regex", "pattern": "a"}, "regex"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"properties": {"a": {"divisibleBy": 2}}}, "divisibleBy"),
        ({"anyOf": [{"disallow": "string"}]}, "disallow"),
        ({"items": {"extends": {}}}, "extends"),
        ({"$defs": {"x": {"x-guidance": {"lenient": True}}}}, "x-guidance"),
        ({"properties": {"a": {"required": True}}}, "required"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "typo"}, "typo"),
        ({"const": 1234567890123456789}, "const .* 1234567890123456789"),
        ({"properties": {"a": {"enum": [1, {"b": [-(2**53) - 1]}]}}}, "enum .* -9007199254740993"),
        ({"const": 2**63}, "const .* 9223372036854775808"),
        ({"type": "integer", "enum": [1e20]}, "enum .* 1e\\+20"),
        ({"type": "integer", "minimum": 2**63}, "minimum .* 9223372036854775808"),
    ],
)
def test_a_keyword_that_is_not_supported_is_named(tokenizer: LLTokenizer, schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(BadRequest, match=keyword):
        compile_grammar(tokenizer, json_schema_grammar(schema))


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        ('^[^"]+$', ["a", "a\\", "é\n"], ['"', 'a"', '"\b']),
        (r'^[^\\/:*?"<>|]+$', ["a.txt", "b\t"], ["\\", '"', "a/"]),
        (r'^([^\n"\\]|\[\^)$', ["a", "[^"], ["\n", '"', "\\"]),
        (r'^[^]"]$', ["a", "["], ["]", '"']),
        (r'^[^-"]$', ["a", "!"], ["-", '"']),
        (r'^[^--9"]$', ["a", "!"], ["-", "5", '"']),
    ],
)
def test_negated_classes_of_a_pattern_hold_for_quotes_and_backslashes(
    tokenizer: LLTokenizer, pattern: str, accepted: list[str], refused: list[str]
) -> None:
    source = json_schema_grammar({"type": "string", "pattern": pattern})
    for text in accepted:
        assert accepts(tokenizer, source, json.dumps(text, ensure_ascii=False)), text
    for text in refused:
        assert not accepts(tokenizer, source, json.dumps(text)), text
    keys = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    assert accepts(tokenizer, json_schema_grammar(keys), json.dumps({accepted[0]: None}))
    assert not any(accepts(tokenizer, json_schema_grammar(keys), json.dumps({text: None})) for text in refused)


def test_large_integers_that_are_floats_are_written_in_full(tokenizer: LLTokenizer) -> None:
    for number in (2**53, -(2**53), 2**53 + 2, 2**62 + 1024, 2**63 - 1024, 0):
        assert accepts(tokenizer, json_schema_grammar({"enum": [number, None, True]}), str(number))


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.0001"], ["0", "0.0"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.1", "1.49"], ["1", "1.0", "1.5"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "0.0"]),
        ({"exclusiveMaximum": 1, "minimum": 0.5}, ["0.5", "0.99"], ["1", "1.0"]),
        ({"exclusiveMinimum": 1, "minimum": 1.25, "maximum": 1.5}, ["1.25", "1.5"], ["1", "1.1"]),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
        ({"type": "integer", "exclusiveMaximum": -(2**53) - 1}, [str(-(2**53) - 4)], [str(-(2**53) - 1), "5"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [str(2**63 - 1), "-5"], [str(2**63)]),
        ({"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, ["-1.5", str(2**60)], [str(10**39)]),
    ],
)
def test_bounds_of_numbers_hold(
    tokenizer: LLTokenizer, schema: dict[str, Any], accepted: list[str], refused: list[str]
) -> None:
    source = json_schema_grammar({"type": "number", **schema})
    for text in accepted:
        assert accepts(tokenizer, source, text), text
    for text in refused:
        assert not accepts(tokenizer, source, text), text


def test_a_listed_property_has_one_spelling(tokenizer: LLTokenizer) -> None:
    """Otherwise it is a further property under another spelling, with any value."""
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}, "b": {"const": "\\u0001"}}}
    for source in (json_schema_grammar(schema), "start: " + embedded_schema(schema)):
        assert accepts(tokenizer, source, '{"größe": 1, "c": "\\n\\t\\\\é"}')
        assert not accepts(tokenizer, source, '{"größe": 1, "gr\\u00f6\\u00dfe": "x"}')
        assert not accepts(tokenizer, source, '{"gr\\u00f6\\u00dfe": "x"}')
    closed = json_schema_grammar({**schema, "properties": {"a": {"type": "string"}}, "additionalProperties": False})
    assert accepts(tokenizer, closed, '{"a": "\\u001b"}')
    control = json_schema_grammar({"type": "object", "properties": {"a": {"const": "\x1b\x7f"}}})
    assert accepts(tokenizer, control, '{"a": "\\u001b\\u007f"}')


@pytest.mark.parametrize("more", [{}, {"pattern": "^[12]"}])
def test_dates_exist(tokenizer: LLTokenizer, more: dict[str, Any]) -> None:
    for kind, time_of_day in (("date", ""), ("date-time", "T12:00:00Z")):
        source = json_schema_grammar({"type": "string", "format": kind, **more})
        for day in ("2024-02-29", "2000-02-29", "1996-02-29", "2023-02-28", "1999-12-31", "2023-11-30"):
            assert accepts(tokenizer, source, f'"{day}{time_of_day}"'), day
        for day in ("2023-02-29", "1900-02-29", "2024-02-30", "2023-11-31", "2023-13-01"):
            assert not accepts(tokenizer, source, f'"{day}{time_of_day}"'), day


def test_properties_may_have_the_names_of_keywords(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"extends": {"type": "string"}, "not": {"type": "null"}}}
    assert accepts(tokenizer, json_schema_grammar(schema), '{"extends": "x", "not": null}')


def test_branches_that_a_constant_tells_apart_may_be_exclusive(tokenizer: LLTokenizer) -> None:
    def branch(kind: str) -> dict[str, Any]:
        properties = {"kind": {"const": kind, "type": "string"}, kind: {"type": "integer"}}
        return {"type": "object", "properties": properties, "required": ["kind", kind]}

    union = {"discriminator": {"propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
    schema = {
        "type": "object",
        "properties": {"pet": union},
        "required": ["pet"],
        "$defs": {"cat": branch("cat"), "dog": branch("dog")},
    }
    source = json_schema_grammar(schema)
    assert accepts(tokenizer, source, '{"pet": {"kind": "dog", "dog": 3}}')
    assert not accepts(tokenizer, source, '{"pet": {"kind": "dog", "cat": 3}}')
    schema["$defs"]["dog"]["properties"]["kind"]["const"] = "cat"
    with pytest.raises(BadRequest, match="oneOf"):
        compile_grammar(tokenizer, json_schema_grammar(schema))


def test_only_objects_are_in_one_of_several_branches_that_do_not_name_their_type(tokenizer: LLTokenizer) -> None:
    cat, dog = ({"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog"))
    nullable = [{**each, "type": ["object", "null"]} for each in (cat, dog)]
    for schema in ({"oneOf": [cat, dog]}, {"oneOf": nullable}, {"oneOf": [cat, dog], "type": ["object", "null"]}):
        source = json_schema_grammar(schema)
        assert accepts(tokenizer, source, '{"kind": "dog"}')
        assert not any(accepts(tokenizer, source, text) for text in ("null", "5", '{"kind": "cow"}'))
    assert accepts(tokenizer, json_schema_grammar({"oneOf": [cat]}), "5")
    with pytest.raises(BadRequest, match="oneOf"):
        compile_grammar(tokenizer, json_schema_grammar({"oneOf": [cat, dog], "type": "null"}))


def test_branches_that_refer_to_one_large_object_take_no_time() -> None:
    names = [f"p{number}" for number in range(600)]
    large = {"type": "object", "properties": {name: {"const": "x"} for name in names}, "required": names}
    schema = {"$defs": {"large": large}, "oneOf": [{"$ref": "#/$defs/large"}] * 600}
    began_s = time.process_time()
    json_schema_grammar(schema)
    assert time.process_time() - began_s < 2.0


def test_many_unions_of_two_large_objects_take_no_time() -> None:
    names = [f"p{number}" for number in range(1000)]
    first, second = (
        {"type": "object", "properties": {name: {"const": text} for name in names}, "required": names} for text in "xy"
    )
    union = {"oneOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}]}
    schema = {"properties": {f"a{number}": union for number in range(1000)}, "$defs": {"X": first, "Y": second}}
    began_s = time.process_time()
    assert "oneOf" not in json_schema_grammar(schema)
    assert time.process_time() - began_s < 2.0


def test_the_size_is_bounded_before_the_schema_is_read() -> None:
    with pytest.raises(BadRequest, match="characters, more than"):
        json_schema_grammar({"description": "a" * MAX_SOURCE_CHARS})


def test_nesting_is_bounded() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(MAX_SCHEMA_DEPTH):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadRequest, match="nested more than 64 deep"):
        json_schema_grammar(schema)


def test_objects_can_be_closed() -> None:
    schema = {
        "properties": {"a": {"properties": {}}, "b": {"additionalProperties": True, "properties": {}}},
        "items": {"anyOf": [{"properties": {"properties": {"type": "string"}}}]},
    }
    closed = without_further_properties(schema)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["b"]["additionalProperties"] is True
    assert json.dumps(closed).count("additionalProperties") == 4
    assert "additionalProperties" not in schema


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("propertyNames", {"type": "object", "propertyNames": 5}),
        ("propertyNames", {"type": "object", "propertyNames": None}),
        ("format", {"type": "string", "format": ["date"]}),
        ("format", {"type": "string", "format": {"date": True}}),
    ],
)
def test_a_keyword_with_a_value_of_another_type_is_refused_or_left_out(
    tokenizer: LLTokenizer, keyword: str, schema: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest, match=keyword):
        compile_grammar(tokenizer, json_schema_grammar(schema))
    relaxed = Relaxed()
    compile_grammar(tokenizer, json_schema_grammar(schema, relaxed=relaxed))
    assert relaxed.names == (keyword,)


def test_the_grammar_is_what_llguidance_takes() -> None:
    assert not LLMatcher.validate_grammar(json_schema_grammar(ROW))


def test_many_lists_of_enumerated_names_take_no_time() -> None:
    inner: dict[str, Any] = {"type": "number"}
    for _ in range(8):
        inner = {"propertyNames": {"$ref": "#/$defs/names"}, "additionalProperties": inner}
    names = {"names": {"enum": [f"name {number}" for number in range(5000)]}}
    schema = {"$defs": names, "anyOf": [inner, *({**inner, "title": f"{number}"} for number in range(300))]}
    began_s = time.process_time()
    assert '"propertyNames"' in json_schema_grammar(schema)
    assert time.process_time() - began_s < 2.0
