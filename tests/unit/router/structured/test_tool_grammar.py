"""What a grammar lets a model write is read back as calls with valid arguments."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.parsed_message import ParsedMessage, parse_whole
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.base.errors import BadRequest
from router.output.formats import TOOL_FORMATS, choose_formats
from router.structured.lark_rules import Vocabulary
from router.structured.relaxed import Relaxed
from router.structured.tool_arguments import Schema
from router.structured.tool_grammar import final_grammar, tool_grammar
from router.structured.tool_markup import UNMARKED, written_calls

FORMATS = list(TOOL_FORMATS)
TAGGED = ["qwen3_coder", "glm45", "seed_oss", "minimax_m2"]
FUNCTIONS = [
    Schema(
        "weather",
        {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
                "unit": {"enum": ["c", "f\"'\\", None, True]},
                "city": {"$ref": "#/$defs/short"},
                "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"short": {"type": "string", "maxLength": 3}},
        },
    ),
    Schema("now", None),
    Schema("get-some.thing", {"properties": {"x": {"type": "number", "multipleOf": 5}}, "additionalProperties": False}),
]
MARKERS = sorted(
    {"<think>", "</think>", *(marker for each in TOOL_FORMATS.values() for marker in each.markers)}
    - {"functools", "[ARGS]", "[CALL_ID]", "<parameter=", ">", "</parameter>", '<parameter name="', '">'}
)


def _tokenizer(*markers: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", *markers])
    return tokenizer


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    special = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    return Vocabulary(special.get, tokenizer.token_to_id)


def _write(tokenizer: Tokenizer, source: str, seed: int) -> str:
    """A random text of the grammar."""
    end = tokenizer.token_to_id("</s>")
    guide = LLTokenizer(tokenizer.to_str(), eos_token=end)
    matcher = LLMatcher(guide, source)
    assert not matcher.is_error(), matcher.get_error()
    draw, ids = random.Random(seed), []
    while not matcher.is_stopped() and len(ids) < 3000:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask).tolist()
        if end in allowed and draw.random() < 0.5:
            break
        ids.append(draw.choice([token_id for token_id in allowed if token_id != end]))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    return tokenizer.decode(ids, skip_special_tokens=False)


def _read(format_name: str, text: str, reasoning: str = "none", prompt: str = "") -> ParsedMessage:
    formats = choose_formats("", lambda _: False, tool_call_parser=format_name, reasoning_parser=reasoning)
    new_parser = formats.parser(prompt, {each.name: each.parameters for each in FUNCTIONS})
    assert new_parser is not None
    return parse_whole(new_parser(), text)


def _check(message: ParsedMessage, shown: Any) -> None:
    assert message.tool_calls, shown
    assert not message.content, shown
    for call in message.tool_calls:
        (function,) = [each for each in FUNCTIONS if each.name == call.name]
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, function.parameters or {"maxProperties": 0})


@pytest.mark.parametrize(
    ("name", "special"),
    [(name, special) for name in FORMATS for special in (True, False) if special or name != "openai"],
)
def test_forced_calls_are_read_back_and_their_arguments_are_valid(name: str, special: bool) -> None:
    tokenizer = _tokenizer(*(MARKERS if special else ()))
    source = tool_grammar(name, FUNCTIONS, _vocabulary(tokenizer), parallel=True)
    numbers = set()
    for seed in range(12):
        text = _write(tokenizer, source, seed)
        message = _read(name, text)
        _check(message, (seed, text))
        numbers.add(len(message.tool_calls))
    assert max(numbers) > 1 or name == "openai"


def test_newer_mistral_models_name_the_function_first() -> None:
    tokenizer = _tokenizer("[TOOL_CALLS]", "[ARGS]")
    text = _write(tokenizer, tool_grammar("mistral", FUNCTIONS, _vocabulary(tokenizer), parallel=True), 0)
    assert "[ARGS]{" in text
    _check(_read("mistral", text), text)


def test_without_parallel_calls_there_is_one() -> None:
    tokenizer = _tokenizer(*MARKERS)
    source = tool_grammar("hermes", FUNCTIONS, _vocabulary(tokenizer), parallel=False)
    assert {len(_read("hermes", _write(tokenizer, source, seed)).tool_calls) for seed in range(8)} == {1}


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
REASONING = f"a <tool call>, maybe\n</think>\n\n{CALL}"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("prompt", "closed_by_token", "texts", "refused"),
    [
        ("</think>", False, [CALL], "<think>"),
        ("<think>", True, [CALL, "\n\n" + CALL], "a"),
        ("", False, [CALL, "<think>\n" + REASONING], "a"),
        ("<think>", False, [REASONING], f"{REASONING}a"),
    ],
)
def test_reasoning_before_the_call(
    prompt: str, closed_by_token: bool, texts: list[str], refused: str, special: bool
) -> None:
    tokenizer = _tokenizer(*(MARKERS if special else ()))
    formats = choose_formats("", lambda _: False, tool_call_parser="hermes", reasoning_parser="qwen3")
    vocabulary = _vocabulary(tokenizer)._replace(token_id=lambda _: 0 if closed_by_token else None)
    source = tool_grammar("hermes", FUNCTIONS, vocabulary, parallel=False, tags=formats.reasoning, prompt=prompt)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    for text in texts:
        accepted = matcher.deep_copy()
        assert accepted.consume_tokens(tokenizer.encode(text).ids), accepted.get_error()
        assert accepted.is_accepting()
        _check(_read("hermes", text, "qwen3", prompt if prompt and not closed_by_token else ""), text)
    ids = tokenizer.encode(refused).ids
    assert matcher.try_consume_tokens(ids) < len(ids)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - UNMARKED.keys() - {"openai"}))
def test_calls_that_are_not_forced_are_valid_too(name: str, special: bool) -> None:
    tokenizer = _tokenizer(*(MARKERS if special else ()))
    source = tool_grammar(name, FUNCTIONS, _vocabulary(tokenizer), parallel=True, forced=False)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    called = _write(tokenizer, tool_grammar(name, FUNCTIONS, _vocabulary(tokenizer), parallel=True), 1)
    for text in ("", "Just </words>, [1] \n", called, f"Let me <see>.\n{called}"):
        accepted = matcher.deep_copy()
        assert accepted.consume_tokens(tokenizer.encode(text).ids), (text, accepted.get_error())
        assert accepted.is_accepting()
    for function in FUNCTIONS:
        called = called.replace(function.name, "other")
    wrong = tokenizer.encode(f"Let me see.{called}").ids
    assert matcher.try_consume_tokens(wrong) < len(wrong)


UNFORCED = {
    "llama3_json": ["{called}", "\n\n{called}", "See </b>.\n<|python_tag|>{called}", '{"name": "Paris", "parameters": {}}',
                    '{"type": "function", "name": "now", "parameters": {}}', '{"a": "b"}, [1] \\n', ""],
    "pythonic": ["{called}", "\n{called}", "[other(x=1)]", "[1, 2] now() [now()]", "[nowhere()]", ""],
    "llama4_pythonic": ["{called}", "See </b>.\n{called}", "[now()]", "[nowhere()]", ""],
    "openai": ["{called}", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I"
               "<|end|><|start|>assistant{called}", "<|channel|>final<|message|>{}", "<|channel|>final<|message|>"],
}  # fmt: skip


def _accepts(tokenizer: Tokenizer, matcher: LLMatcher, text: str) -> bool:
    copied, ids = matcher.deep_copy(), tokenizer.encode(text).ids
    return copied.try_consume_tokens(ids) == len(ids) and copied.is_accepting()


@pytest.mark.parametrize(
    ("name", "special"),
    [(name, special) for name in UNFORCED for special in (True, False) if special or name != "openai"],
)
def test_calls_without_a_marker_before_them_are_valid_or_text(name: str, special: bool) -> None:
    tokenizer = _tokenizer(*(MARKERS if special else ()))
    source = tool_grammar(name, FUNCTIONS, _vocabulary(tokenizer), parallel=True, forced=False)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    assert not matcher.is_error(), matcher.get_error()
    forced = tool_grammar(name, FUNCTIONS, _vocabulary(tokenizer), parallel=True)
    for seed in range(6):
        called = _write(tokenizer, forced, seed)
        for text in (each.replace("{called}", called) for each in UNFORCED[name]):
            assert _accepts(tokenizer, matcher, text), text
        _check(_read(name, called), called)
        draw = random.Random(seed)
        for _ in range(80):
            at, gone = draw.randrange(len(called) + 1), draw.randrange(3)
            text = called[:at] + draw.choice(
                ["", "", '"', "x", " ", "\n", "{", "[", "(", ",", "\\u006e", "<|python_tag|>"]
            )
            text += called[at + gone :]
            message = _read(name, text)
            if message.tool_calls and _accepts(tokenizer, matcher, text):
                message.content = ""
                _check(message, text)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama3_json", '{"name": "now", "parameters": {"x": 1}}'),
        ("llama3_json", ' \n{"parameters": {"x": 1}, "name": "now"}'),
        ("llama3_json", '{"a": 1, "name": "n\\u006fw", "parameters": {"x": 1}}'),
        ("llama3_json", 'Well. <|python_tag|>{"name": "now", "parameters": {"x": 1}}'),
        ("pythonic", "[now(x=1)]"),
        ("pythonic", " [ now(x=1)]"),
        ("pythonic", "Well. <|python_start|>[now(x=1)]"),
        ("openai", '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"x": 1}'),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_what_the_parser_takes_for_a_wrong_call_cannot_be_written(name: str, wrong: str, special: bool) -> None:
    tokenizer = _tokenizer(*(MARKERS if special or name == "openai" else ()))
    assert _read(name, wrong).tool_calls
    source = tool_grammar(name, FUNCTIONS, _vocabulary(tokenizer), parallel=True, forced=False)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    assert not _accepts(tokenizer, matcher, wrong)


@pytest.mark.parametrize("forced", [True, False])
def test_a_function_that_takes_anything_takes_any_keywords(forced: bool) -> None:
    tokenizer = _tokenizer(*MARKERS)
    source = tool_grammar(
        "pythonic", [Schema("f", {"type": "object"})], _vocabulary(tokenizer), parallel=True, forced=forced
    )
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    for text in ("[f()]", '[f(a={"b": [1]}, c_2="x")]', "[f(größe=1)]"):
        assert _accepts(tokenizer, matcher, text), text


def test_a_parameter_that_no_value_fits_cannot_be_given() -> None:
    tokenizer = _tokenizer(*MARKERS)
    parameters = {"type": "object", "properties": {"a": False, "b": True, "e\u0301": {}}, "additionalProperties": False}
    source = tool_grammar("pythonic", [Schema("f", parameters)], _vocabulary(tokenizer), parallel=True)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    for text, accepted in (("[f(b=1)]", True), ("[f(a=1)]", False), ("[f(a=1, b=1)]", False), ("[f(e\u0301=1)]", True)):
        assert _accepts(tokenizer, matcher, text) == accepted, text
    with pytest.raises(BadRequest, match="no value fits the required parameter 'a'"):
        tool_grammar(
            "pythonic", [Schema("f", {**parameters, "required": ["a"]})], _vocabulary(tokenizer), parallel=True
        )


def test_a_function_whose_schema_refers_to_itself_takes_its_own_keywords_only() -> None:
    tokenizer = _tokenizer(*MARKERS)
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}, "additionalProperties": False}
    parameters = {"$defs": {"Tree": tree}, "$ref": "#/$defs/Tree"}
    source = tool_grammar("pythonic", [Schema("f", parameters)], _vocabulary(tokenizer), parallel=True)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    for text, accepted in (('[f(left={"left": {}})]', True), ("[f()]", True), ("[f(right={})]", False)):
        assert _accepts(tokenizer, matcher, text) == accepted, text


def test_keywords_that_are_not_listed_follow_the_schema_of_further_ones() -> None:
    tokenizer = _tokenizer(*MARKERS)
    schema = Schema("f", {"type": "object", "additionalProperties": {"type": "integer"}})
    source = tool_grammar("pythonic", [schema], _vocabulary(tokenizer), parallel=True)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    assert _accepts(tokenizer, matcher, "[f(a=1, b=2)]")
    assert not _accepts(tokenizer, matcher, '[f(a="x")]')


@pytest.mark.parametrize("otherwise", ["start: /yes|no/", LLMatcher.grammar_from_regex("yes|no")])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_of_a_given_form_may_take_the_calls_place(name: str, otherwise: str) -> None:
    tokenizer = _tokenizer(*MARKERS)
    source = tool_grammar(name, FUNCTIONS, _vocabulary(tokenizer), parallel=True, forced=False, otherwise=otherwise)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    answer = "<|channel|>final<|message|>yes" if name == "openai" else "yes"
    for text in (answer, _write(tokenizer, tool_grammar(name, FUNCTIONS, _vocabulary(tokenizer), parallel=True), 1)):
        accepted = matcher.deep_copy()
        assert accepted.consume_tokens(tokenizer.encode(text).ids), (text, accepted.get_error())
        assert accepted.is_accepting()
    assert _read(name, answer) == ParsedMessage("yes")
    assert matcher.try_consume_tokens(tokenizer.encode("maybe").ids) == 0


@pytest.mark.parametrize("answer", ["start: /yes|no/", LLMatcher.grammar_from_regex("yes|no")])
def test_gpt_oss_answers_in_a_given_form_on_its_final_channel(answer: str) -> None:
    tokenizer = _tokenizer(*MARKERS)
    source = final_grammar(answer, _vocabulary(tokenizer))
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    thought = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant"
    for text, message in (
        ("<|channel|>final<|message|>yes", ParsedMessage("yes")),
        (thought + "<|channel|>final<|message|>no", ParsedMessage("no", "hm {")),
    ):
        assert _accepts(tokenizer, matcher, text)
        assert _read("openai", text) == message
    for text in ("yes", "<|channel|>final<|message|>maybe"):
        assert not _accepts(tokenizer, matcher, text)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("hermes", {"type": "array"}, "of type object"),
        ("pythonic", {"properties": {"a b": {}}}, "'a b'"),
        ("pythonic", {"properties": ["a"]}, "properties must be an object"),
        ("pythonic", {"$ref": "#/$defs/a", "$defs": {"a": {"required": ["x"]}}}, "'x'"),
        ("pythonic", {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
        ("llama4_pythonic", {"patternProperties": {"^a": {"type": "integer"}}}, "patternProperties"),
        ("pythonic", {"properties": {"a": {}}, "required": ["b"]}, "'b'"),
        ("pythonic", {"properties": {"a": {}}, "required": True}, "required a list"),
        ("pythonic", {"properties": {"a": {}}, "required": ["a", {}]}, "required '{}'"),
        ("pythonic", {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, r"\$ref"),
    ],
)
def test_functions_that_the_format_cannot_call_are_refused(name: str, parameters: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        tool_grammar(name, [Schema("f", parameters)], _vocabulary(_tokenizer()), parallel=True)


def test_definitions_that_each_parameter_would_copy_are_bounded() -> None:
    parameters = {
        "properties": {f"p{number}": {"$ref": "#/$defs/large"} for number in range(2000)},
        "$defs": {"large": {"enum": [f"value {number}" for number in range(4000)]}},
    }
    began_s = time.process_time()
    with pytest.raises(BadRequest, match="parameters take more than 262144 characters"):
        tool_grammar("pythonic", [Schema("f", parameters)], _vocabulary(_tokenizer()), parallel=True)
    assert time.process_time() - began_s < 2.0


def _tagged_matcher(
    name: str, properties: Any, relaxed: Relaxed | None = None, **more: Any
) -> tuple[Tokenizer, LLMatcher]:
    tokenizer = _tokenizer(*MARKERS)
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    source = tool_grammar(name, [Schema("f", schema)], _vocabulary(tokenizer), parallel=False, relaxed=relaxed)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    assert not matcher.is_error(), matcher.get_error()
    return tokenizer, matcher


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": "string"}, ["5", "a\nb", "</p>", '"a"', ""], ["a</parameter>b</arg_value>"]),
        ({"type": "string", "maxLength": 3}, ["abc"], ["abcd"]),
        ({"type": "string", "pattern": "^[a/]+$", "minLength": 2}, ["a/"], ["a", "ab"]),
        ({"type": "string", "pattern": "b"}, ["abc", "b"], ["a"]),
        ({"enum": ["a", "b c"]}, ["a", "b c"], ["c"]),
        ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["2", "true"]),
        ({"const": "x/y"}, ["x/y"], ["x"]),
        ({"type": "integer", "minimum": 3}, ["3"], ["2", "x", "3.5"]),
        ({"type": "boolean"}, ["true"], ["True", "x"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, ["[1]"], ["[1, 2]", "x"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["null", "a"], ["5", "[", "True"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, ["a", "3"], ["2", "null"]),
        ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, ["a", "true", "false", "truest"], ["null", "None"]),
        ({"$ref": "#/$defs/short"}, ["ab"], ["abc"]),
        ({}, ["anything", "5", '{"a": 1}'], ["</parameter></arg_value>"]),
    ],
)
def test_a_value_between_tags_follows_its_schema(
    name: str, schema: Any, accepted: list[str], refused: list[str]
) -> None:
    short = {"$defs": {"short": {"type": "string", "maxLength": 2}}}
    tokenizer, matcher = _tagged_matcher(name, {"x": schema}, **short)
    for text in accepted:
        assert _accepts(tokenizer, matcher, written_calls(name, [("f", {"x": text})])), text
    for text in refused:
        assert not _accepts(tokenizer, matcher, written_calls(name, [("f", {"x": text})])), text


def test_what_a_text_cannot_be_held_to_is_named_or_refused() -> None:
    relaxed = Relaxed()
    tokenizer, matcher = _tagged_matcher("qwen3_coder", {"x": {"type": "string", "format": "date"}}, relaxed)
    assert _accepts(tokenizer, matcher, written_calls("qwen3_coder", [("f", {"x": "soon"})]))
    assert relaxed.names == ("f.format",)
    with pytest.raises(BadRequest, match="cannot hold format of a text"):
        _tagged_matcher("qwen3_coder", {"x": {"type": "string", "format": "date"}})


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
def test_an_odd_keyword_of_one_function_does_not_fail_another(name: str) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "whatever"}}, "anyOf": 5}
    tokenizer, relaxed = _tokenizer(*MARKERS), Relaxed()
    functions = [Schema("odd", odd), FUNCTIONS[0]]
    source = tool_grammar(name, functions, _vocabulary(tokenizer), parallel=False, relaxed=relaxed)
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>")), source)
    for calls in ([("odd", {"any": [1]})], [("weather", {"city": "abc"})]):
        assert _accepts(tokenizer, matcher, written_calls(name, calls)), calls
    assert relaxed.names == ("odd.parameters",)
    with pytest.raises(BadRequest):
        _validated(tool_grammar(name, [Schema("odd", odd, strict=True)], _vocabulary(tokenizer), parallel=False))


def _validated(source: str) -> None:
    """Raises: BadRequest, as the router does where llguidance refuses a grammar."""
    problem = LLMatcher.validate_grammar(source)
    if problem:
        raise BadRequest(problem)
