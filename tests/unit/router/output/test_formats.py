"""Every tool format: what it reads, what it leaves as content, and that cuts change nothing."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parsed_message import ParsedMessage, parse_whole

from common.base.errors import ConfigError
from router.output.formats import TOOL_FORMATS, OutputFormats, choose_formats
from router.output.tagged import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS
from router.structured.tool_markup import written_calls

FUNCTIONS: dict[str, dict[str, Any] | None] = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "count": {"$ref": "#/$defs/count"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "on": {"type": "boolean"},
            "unit": {"enum": ["1", 2, None]},
        },
        "$defs": {"count": {"type": "integer"}},
    },
    "g": None,
    "get_weather": {"type": "object"},
}
_TAGGED = {"qwen3_coder": QWEN3_CODER, "seed_oss": SEED_OSS, "minimax_m2": MINIMAX_M2, "glm45": GLM45}


def _no_token(token: str) -> bool:
    return False


def _formats(tools: str = "none", reasoning: str = "none") -> OutputFormats:
    return choose_formats("", _no_token, tool_call_parser=tools, reasoning_parser=reasoning)


def _parser(formats: OutputFormats, prompt: str = "") -> Any:
    numbers = itertools.count()
    new_parser = formats.parser(prompt, FUNCTIONS, make_id=lambda: f"id{next(numbers)}")
    assert new_parser is not None
    return new_parser()


def _parse(text: str, tools: str, reasoning: str = "none", prompt: str = "") -> ParsedMessage:
    return parse_whole(_parser(_formats(tools, reasoning), prompt), text)


def _calls(message: ParsedMessage) -> list[tuple[str | None, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


_WEATHER = '{"city": "Paris", "days": [1, {"a": "}"}]}'
_EXAMPLES = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>\n'
    '<tool_call>{"arguments": {}, "name": "g"}</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": %s}; {"name": "g", "arguments": {}}',
    "mistral": 'Let me see.[TOOL_CALLS] [{"name": "f", "arguments": %s}, {"name": "g", "arguments": {}}]',
    "deepseek_v3": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "openai": "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.f <|constrain|>json<|message|>%s<|call|><|start|>assistant to=functions.g<|channel|>commentary"
    "<|message|>{}<|call|>",
    **{
        name: "Let me see.\n" + written_calls(name, [("f", {"%s": 0}), ("g", {})]).replace('{"%s": 0}', "%s")
        for name in ("kimi_k2", "granite", "phi4_mini_json", "hunyuan_a13b", "nemotron_json", "cohere_command3", "apertus")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", _EXAMPLES)
def test_two_calls_are_read_and_markup_is_dropped(name: str) -> None:
    message = _parse(_EXAMPLES[name] % _WEATHER, name)
    assert _calls(message) == [("f", json.loads(_WEATHER)), ("g", {})]
    assert message.tool_calls[0].arguments == _WEATHER
    ids = ["functions.f:0", "functions.g:1"] if name == "kimi_k2" else ["id0", "id1"]
    assert [call.id for call in message.tool_calls] == ids
    assert message.content == ("" if name == "llama3_json" else "Let me see.")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_format_reads_the_calls_that_its_markup_writes(name: str) -> None:
    given = {
        "city": 'a "b"\n<c>',
        "days": [1, {"a": "}"}],
        "count": 3,
        "note": None,
        "on": False,
        "unit": "1",
        "x": "y",
    }
    if name == "openai":  # one call ends its answer
        assert _calls(_parse(written_calls(name, [("f", given)]), name)) == [("f", given)]
        return
    message = _parse(written_calls(name, [("f", given), ("g", {})]), name)
    assert (_calls(message), message.content) == ([("f", given), ("g", {})], "")


@pytest.mark.parametrize("name", _TAGGED)
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", "True", "True"),
        ("city", '"Paris"', '"Paris"'),
        ("city", "  two\n\nlines \\ ", "  two\n\nlines \\ "),
        ("count", "5", 5),
        ("count", " 5\n", 5),
        ("count", "five", "five"),
        ("on", "True", True),
        ("on", "false", False),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "5", "5"),
        ("note", "", ""),
        ("days", "[1, 'a']", [1, "a"]),
        ("days", '[1, "a"', '[1, "a"'),
        ("unit", "1", "1"),
        ("unit", "2", 2),
        ("unknown", "007", "007"),
        ("unknown", "7", 7),
        ("unknown", '{"a": [1]}', {"a": [1]}),
        ("unknown", "NaN", "NaN"),
    ],
)
def test_a_parameter_between_tags_is_what_its_schema_says(name: str, key: str, text: str, value: Any) -> None:
    written = written_calls(name, [("f", {key: text})])
    assert _calls(_parse(written, name)) == [("f", {key: value})]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31", "kimi_k2"])
def test_white_space_between_the_last_call_and_the_end_of_calls_is_no_content(name: str) -> None:
    written = written_calls(name, [("f", {})])
    end = written[written.rindex("<") :]
    message = _parse(f"{written.removesuffix(end)} \n{end}Done.", name)
    assert (message.content, _calls(message)) == ("Done.", [("f", {})])


@pytest.mark.parametrize("name", _TAGGED)
def test_strings_between_tags_are_streamed_and_may_be_cut_off(name: str) -> None:
    text = written_calls(name, [("f", {"city": 'line 1\n"line 2"\nline 3'})])
    at = text.index("line 3")
    parser, message = _parser(_formats(name)), ParsedMessage()
    for char in text[:at]:
        message.add(parser.push(char))
    assert message.tool_calls[0].arguments.startswith('{"city": "line 1\\n\\"line 2\\"')
    message.add(parser.finish())
    assert message.tool_calls[0].arguments == '{"city": "line 1\\n\\"line 2\\"\\n'
    cut = _parse(written_calls(name, [("f", {"count": 1234})])[: text.index("line 1") + 2], name)
    assert cut.tool_calls[0].arguments in ('{"count": ', "{")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=city>Paris</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=city>\nParis\n</parameter></function>"),
        ("glm45", "<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{"city": "Paris"}'),
        ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"city": "Paris"}}]'),
        ("phi4_mini_json", '<|tool_call|>{"name": "f", "arguments": {"city": "Paris"}}<|/tool_call|>'),
        ("granite", '<tool_call>[{"name": "f", "arguments": {"city": "Paris"}}]</tool_call>'),
        ("cohere_command3", '<|START_ACTION|>[\n{"tool_name": "f", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>'),
        ("olmo3", "<function_calls>\nf(city='Paris')\n</function_calls>"),
    ],
)
def test_what_models_write_otherwise_is_read_too(name: str, text: str) -> None:
    message = _parse(text, name)
    assert (_calls(message), message.content) == ([("f", {"city": "Paris"})], "")


def test_arguments_are_streamed_as_the_model_writes_them() -> None:
    parser = _parser(_formats("hermes"))
    pieces = ['<tool_call>{"name": "f", "arg', 'uments": {"ci', 'ty": "Par', 'is"}', "}</tool_call>"]
    deltas = [parser.push(piece) for piece in pieces]
    assert [call.arguments for delta in deltas for call in delta.tool_calls] == ['{"ci', 'ty": "Par', 'is"}']
    assert [call.name for delta in deltas for call in delta.tool_calls] == ["f", None, None]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(a=1), g(b='x\\n', c=[True, None, {'k': -1.5}])]", [("f", {"a": 1}), ("g", {"b": "x\n", "c": [True, None, {"k": -1.5}]})]),
        ("[f()]", [("f", {})]),
        (f"[f(a={'9' * 400})]", [("f", {"a": 10**400 - 1})]),
        ("[f(a=+1e999, b=[-.5, 007., 1E5])]", [("f", {"a": float("inf"), "b": [-0.5, 7.0, 1e5]})]),
        ("[f(größe=1, मात्रा={'ü': 2}, e\u0301=3)]", [("f", {"größe": 1, "मात्रा": {"ü": 2}, "e\u0301": 3})]),
        ('[f(a="it\'s, (fine)", b=(1, 2), c=false)]', [("f", {"a": "it's, (fine)", "b": [1, 2], "c": False})]),
    ],
)  # fmt: skip
def test_python_calls_become_json(text: str, calls: list[Any]) -> None:
    assert _calls(_parse(text, "pythonic")) == calls
    assert _calls(_parse(f"<|python_start|>{text}<|python_end|>", "llama4_pythonic")) == calls


@pytest.mark.parametrize(
    "text",
    [
        *("[f(a=__import__('os'))]", "[h(a=1)]", "[f](http://a)", "[f(a=1+1)]", "[1, 2]", "[f("),
        *("[f(a b=1)]", "[f(<a>=1)]", "[f(a=\u0661)]", "[f(a={1: 2})]"),
    ],
)
def test_python_that_is_no_list_of_literal_calls_is_content(text: str) -> None:
    assert _parse(text, "pythonic") == ParsedMessage(text)


def test_numbers_of_python_calls_keep_their_digits() -> None:
    text = f"[f(a=0.10000000000000000000001, b={'9' * 5000})]"
    assert _parse(text, "pythonic").tool_calls[0].arguments == f'{{"a": 0.10000000000000000000001, "b": {"9" * 5000}}}'


def test_a_python_call_with_a_bad_argument_keeps_the_good_ones_and_loses_no_text() -> None:
    message = _parse("[f(a=1, b=x), g()]", "pythonic")
    assert _calls(message) == [("f", {"a": 1})]
    assert message.content == ", b=x), g()]"


def test_messages_of_one_channel_are_separated_by_a_line_break() -> None:
    opened, ended = "<|start|>assistant<|channel|>", "<|end|>"
    text = f"<|channel|>analysis<|message|>Hm.{ended}{opened}commentary<|message|>Let me see. {ended}"
    text += (
        f"{opened}analysis<|message|>Ah.{ended}{opened}final<|message|>{ended}{opened}final<|message|>Yes.<|return|>"
    )
    assert _parse(text, "openai") == ParsedMessage("Let me see.\nYes.", "Hm.\nAh.")


def test_newer_mistral_calls_name_the_function_before_the_arguments() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}[TOOL_CALLS]get_weather{"b": 2}'
    assert _calls(_parse(text, "mistral")) == [("f", {"a": 1}), ("g", {}), ("get_weather", {"b": 2})]


def test_arguments_written_as_a_string_are_the_object_in_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert _calls(_parse(text, "hermes")) == [("f", {"a": 1}), ("g", {})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nno json</tool_call> after"),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", "a <tool_call"),
        ("hermes", " \n"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] what?"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> nothing <｜tool▁calls▁end｜>"),
        ("qwen3_coder", "<tool_call>\n<function=f"),
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>'),
        ("glm45", "<tool_call>see above"),
        ("minimax_m2", "<minimax:tool_call>\nnothing</minimax:tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|> nothing"),
        ("granite", "<|tool_call|>[1, 2]"),
        ("apertus", "<|tools_prefix|>[{}]"),
        ("olmo3", "<function_calls>h(a=1)</function_calls>"),
        ("openai", "plain text"),
        ("openai", "<|channel|>analysis without a message"),
    ],
)
def test_malformed_calls_are_content(name: str, text: str) -> None:
    assert _parse(text, name) == ParsedMessage(text)


def test_a_call_cut_off_by_the_token_limit_keeps_its_partial_arguments() -> None:
    message = _parse('<tool_call>{"name": "f", "arguments": {"city": "Par', "hermes")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"city": "Par')]
    assert message.content == ""


def test_a_call_that_is_malformed_behind_its_arguments_loses_no_text() -> None:
    message = _parse('<tool_call>{"name": "f", "arguments": {}, oops</tool_call> more', "hermes")
    assert _calls(message) == [("f", {})]
    assert message.content == ", oops</tool_call> more"


def test_text_that_is_undecided_for_too_long_is_content() -> None:
    text = '<tool_call>{"name": "' + "a" * 100_000
    parser = _parser(_formats("hermes"))
    shown = "".join(parser.push(text[at : at + 1000]).content for at in range(0, len(text), 1000))
    assert len(shown) > 60_000
    assert _parse(text + '", "arguments": {}}</tool_call>', "hermes").tool_calls == []


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", '<tool_call>{"a":[\\"'),
        ("mistral", "[TOOL_CALLS]{1:["),
        ("openai", "<|channel|>"),
        ("llama3_json", '<|python_tag|>{"a":[\\"'),
        ("llama4_pythonic", "<|python_start|>[f(a=["),
        ("qwen3_coder", "<tool_call><function="),
        ("glm45", "<tool_call>f "),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
        ("granite", '<|tool_call|>[{"a":[\\"'),
        ("olmo3", "<function_calls>f(a=["),
    ],
)
def test_markers_whose_calls_never_end_take_time_in_proportion_to_the_text(name: str, unit: str) -> None:
    text = unit * 3000
    began_s = time.process_time()
    assert _parse(text, name) == ParsedMessage(text)
    parser, message = _parser(_formats(name)), ParsedMessage()
    for _ in range(3000):
        message.add(parser.push(unit))
    message.add(parser.finish())
    assert message == ParsedMessage(text)
    assert time.process_time() - began_s < 5.0


@pytest.mark.parametrize("begin", ["x", "<think>x"])
def test_much_white_space_takes_time_in_proportion(begin: str) -> None:
    parser, message = _parser(_formats("hermes", "qwen3")), ParsedMessage()
    began_s = time.process_time()
    for piece in [begin, *[" " * 64] * 10_000, "y"]:
        message.add(parser.push(piece))
    message.add(parser.finish())
    assert len(message.content + message.reasoning) == 640_002
    assert time.process_time() - began_s < 3.0


def test_arguments_of_many_values_take_time_in_proportion() -> None:
    arguments = '{"a": [' + "[]," * 150_000 + "[]]}"
    began_s = time.process_time()
    message = _parse('<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>", "hermes")
    assert message.tool_calls[0].arguments == arguments
    assert time.process_time() - began_s < 3.0


def test_gpt_oss_reasons_on_the_analysis_channel_and_answers_on_the_final_one() -> None:
    message = _parse(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "openai"
    )
    assert message == ParsedMessage("Yes.", "Hm.")


def test_gpt_oss_makes_no_calls_where_there_are_no_functions() -> None:
    new_parser = _formats("openai").parser("", {})
    assert new_parser is not None
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parse_whole(new_parser(), text) == ParsedMessage("{}", "Hm.")


@pytest.mark.parametrize("space", ["", " "])
def test_the_first_message_of_gpt_oss_may_begin_with_its_recipient(space: str) -> None:
    message = _parse(space + 'to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "openai")
    assert _calls(message) == [("f", {"a": 1})]
    assert message.content == ""
    assert _parse(space + "to=be or not", "openai") == ParsedMessage(space + "to=be or not")


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nyes", "hm", "yes"),
        ("<think>\n\n</think>\n\n", "yes", "", "yes"),
        ("", "  yes </think>", "", "  yes </think>"),
        ("", "<think>hm", "hm", ""),
        ("user: <think>\nassistant:", "yes", "", "yes"),
    ],
)
def test_reasoning_is_separated_or_dropped(prompt: str, text: str, reasoning: str, content: str) -> None:
    for with_reasoning in (True, False):
        new_parser = _formats(reasoning="qwen3").parser(prompt, {}, with_reasoning=with_reasoning)
        assert new_parser is not None
        assert parse_whole(new_parser(), text) == ParsedMessage(content, reasoning if with_reasoning else "")


def test_reasoning_of_r1_begins_without_a_tag() -> None:
    new_parser = _formats(reasoning="deepseek_r1").parser("<｜Assistant｜>", {})
    assert new_parser is not None
    assert parse_whole(new_parser(), "hm</think>yes") == ParsedMessage("yes", "hm")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("before", "prefill", "text", "reasoning", "content"),
    [
        ("", "Hello, I", " am here", "", " am here"),
        ("<think>\n\n</think>\n\n", "Hello, I", " am here", "", " am here"),
        ("", "<think>\nhm", " so\n</think>\n\nyes", " so", "yes"),
        ("<think>\n\n</think>\n\n", "<think>\nhm", " so</think>yes", " so", "yes"),
        ("<think>\n", "hm", " so</think>yes", " so", "yes"),
        ("", "<think>hm</think>yes", ", sir", "", ", sir"),
        ("", "<think>hm</think>\n", "yes", "", "yes"),
        ("", "<think>\n", "\nhm</think>yes", "hm", "yes"),
        ("", "<think>hm", "</think>yes", "", "yes"),
    ],
)
def test_an_answer_that_continues_a_text_begins_where_that_ends(
    name: str, before: str, prefill: str, text: str, reasoning: str, content: str
) -> None:
    formats = _formats(reasoning=name)
    assert formats.reasoning is not None
    new_parser = formats.parser(formats.reasoning.prompt_before(f"<|assistant|>{before}{prefill}", prefill), {})
    assert new_parser is not None
    assert parse_whole(new_parser(), text) == ParsedMessage(content, reasoning)


@pytest.mark.parametrize("prefill", ["", " \n"])
def test_an_answer_that_continues_nothing_begins_as_any_other(prefill: str) -> None:
    for name, text in (("qwen3", "<think>hm</think>yes"), ("deepseek_r1", "hm</think>yes")):
        tags = _formats(reasoning=name).reasoning
        assert tags is not None
        new_parser = _formats(reasoning=name).parser(tags.prompt_before("<|assistant|>" + prefill, prefill), {})
        assert new_parser is not None
        assert parse_whole(new_parser(), text) == ParsedMessage("yes", "hm")


def test_calls_are_read_only_behind_the_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = _parse(f"<think>I could {call}</think>\n\n{call}", "hermes", "qwen3")
    assert message.reasoning == f"I could {call}"
    assert _calls(message) == [("f", {})]
    assert message.content == ""


_WORDS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<think>",
        "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "```",
        "<｜tool▁calls▁end｜>", "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "analysis", "to=functions.f", " to=",
        '{"name": "f", ', '"arguments": ', "{", "}", "[", "]", '"', "\\", ",", ";", ":", "f", "(", ")", "a=", "'", " ", "\n", "1",
        "<function=", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
        "<|tool_call|>", "<tool_calls>", "<function_calls>", "<seed:tool_call>", "<minimax:tool_call>", '<invoke name="', '">',
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|START_ACTION|>", "city",
        '{"a": "x"}', '{"name": "g", "parameters": {"b": [1]}}', "[f(a=1)", "<", "é", "\ud800", "null",
    ]
)  # fmt: skip


def _texts() -> st.SearchStrategy[str]:
    tagged = [
        written_calls(name, [("f", {"city": "a", "days": [1], "x": "y"}), ("g", {})]) for name in (*_TAGGED, "olmo3")
    ]
    examples = st.sampled_from([*(each % _WEATHER for each in _EXAMPLES.values()), *tagged, "[f(a=1), g(b='x')]"])
    noise = st.lists(_WORDS, max_size=12).map("".join)
    changed = st.tuples(examples, st.integers(0, 400), st.integers(0, 30), noise).map(
        lambda t: t[0][: t[1]] + t[3] + t[0][t[1] + t[2] :]
    )
    return st.one_of(noise, changed)


@settings(max_examples=150, deadline=None)
@given(text=_texts(), cuts=st.lists(st.integers(0, 500), max_size=20), opened=st.booleans())
@pytest.mark.parametrize("reasoning", ["none", "qwen3"])
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - {"qwen3_xml", "glm47", "deepseek_v31"}))
def test_the_result_does_not_depend_on_the_cuts(
    name: str, reasoning: str, text: str, cuts: list[int], opened: bool
) -> None:
    prompt = "<think>\n" if opened else ""
    formats = _formats(name, reasoning)
    whole = parse_whole(_parser(formats, prompt), text)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for pieces in (list(text), [text[a:b] for a, b in itertools.pairwise(edges)]):
        parser, message = _parser(formats, prompt), ParsedMessage()
        for piece in pieces:
            message.add(parser.push(piece))
        message.add(parser.finish())
        assert message == whole
    if not whole.tool_calls and name != "openai" and reasoning == "none":
        assert whole.content == text


def test_a_call_behind_a_long_malformed_one_is_read_however_the_text_is_cut() -> None:
    text = (
        '<tool_call>{"name": "f", "more": "' + "a" * 300_000 + '"}<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    whole = _parse(text, "hermes")
    parser, message = _parser(_formats("hermes")), ParsedMessage()
    for start in range(0, len(text), 1000):
        message.add(parser.push(text[start : start + 1000]))
    message.add(parser.finish())
    assert message == whole
    assert _calls(whole) == [("g", {})]


@pytest.mark.parametrize(
    ("template", "vocabulary", "tools", "tags"),
    [
        ("{% if tools %}<tool_call>...</think>", (), "hermes", "<think>"),
        ("<tool_call><function=f>", (), "hermes (assumed)", None),
        ("<tool_call><function=f><parameter=a></think>", (), "qwen3_coder", "<think>"),
        ("<seed:tool_call><function=f><parameter=a></seed:think>", (), "seed_oss", "<seed:think>"),
        ("<minimax:tool_call></think>", (), "minimax_m2", "<think>"),
        ("<tool_call>{name}<arg_key>", (), "glm45", None),
        ("<|im_system|>tool_declare<|im_middle|>", (), "kimi_k2", None),
        ("<|tool_calls_section_begin|>", (), "kimi_k2", None),
        ("<|tool_call|>", (), "granite", None),
        ("<|tool|>{{ message['tools'] }}<|/tool|>", (), "phi4_mini_json", None),
        ("<tool_calls>", (), "hunyuan_a13b", None),
        ("<TOOLCALL>", (), "nemotron_json", None),
        ("<|START_ACTION|><|END_THINKING|>", (), "cohere_command3", "<|START_THINKING|>"),
        ("<|tools_prefix|><|inner_suffix|>", (), "apertus", "<|inner_prefix|>"),
        ("<function_calls>", (), "olmo3", None),
        ("[TOOL_CALLS]", (), "mistral", None),
        ('"parameters" ipython', (), "llama3_json", None),
        ("[func_name1(a)]", ("<|python_start|>",), "llama4_pythonic", None),
        ("[func_name1(a)]", (), "pythonic", None),
        ("<｜tool▁calls▁begin｜>```json", (), "deepseek_v3", None),
        ("<｜tool▁calls▁begin｜></think>", (), "deepseek_v31", "<think>"),
        ("<|channel|>", (), "openai", None),
        ("hello", (), "hermes (assumed)", None),
    ],
)
def test_the_template_tells_the_formats(
    template: str, vocabulary: tuple[str, ...], tools: str | None, tags: str | None
) -> None:
    formats = choose_formats(template, vocabulary.__contains__)
    assert formats.names[0] == tools
    assert (formats.reasoning and formats.reasoning.open) == tags


def test_the_operators_choice_wins_and_a_wrong_one_is_an_error() -> None:
    formats = choose_formats("<tool_call></think>", _no_token, tool_call_parser="none", reasoning_parser="none")
    assert formats.parser("", FUNCTIONS) is None
    with pytest.raises(ConfigError, match="known are hermes"):
        choose_formats("", _no_token, tool_call_parser="hermse")
    with pytest.raises(ConfigError, match="needs --tool-call-parser openai"):
        choose_formats("<tool_call>", _no_token, reasoning_parser="openai_gptoss")
