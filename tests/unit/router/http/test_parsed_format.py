"""Streams of named events: what one delta may hold."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.http.anthropic.messages_format import MessagesFormat
from router.http.format import FormatOptions
from router.http.ollama.ollama_format import OllamaFormat
from router.http.parsed_format import arguments_object
from router.http.responses_api.responses_format import ResponsesFormat
from router.output.harmony import read_harmony
from router.output.hermes import read_hermes
from router.output.reasoning import ReasoningTags, reasoning
from router.output.writer import FormatParser
from router.requests.request import Delta, Outcome

ENDED = cast(
    "Any",
    SimpleNamespace(
        outcome=Outcome("stop"),
        decision=None,
        served=None,
        request_id="r",
        cached_tokens=0,
        completion_tokens=2,
        ttft_s=0.0,
        request=SimpleNamespace(engine=SimpleNamespace(prompt_ids=[1], prediction=[])),
    ),
)
BEGUN, REST = '<tool_call>{"name": "f", "arguments": {"a": 1', "}}</tool_call> Done."
OPTIONS = FormatOptions("r-1", "m")
THINK = reasoning(ReasoningTags("<think>", "</think>"), opened=False)
NO_TOKENIZER = cast("Any", None)


def _streamed(form: Any, *texts: str) -> list[Any]:
    events = [event for text in texts for event in form.delta(Delta(text, [1], None), 0)]
    return events + form.closing(ENDED, 0, Delta("", [], None))


@pytest.mark.parametrize("cut", [(BEGUN, REST), (BEGUN + REST,), tuple(BEGUN + REST)])
def test_text_behind_a_call_does_not_break_into_its_arguments(cut: tuple[str, ...]) -> None:
    types: dict[int, str] = {}
    texts: dict[str, str] = {}
    for event in _streamed(MessagesFormat(OPTIONS, NO_TOKENIZER, [FormatParser(read_hermes)]), *cut):
        if event["type"] == "content_block_start":
            types[event["index"]] = event["content_block"]["type"]
        elif event["type"] == "content_block_delta":
            kind = types[event["index"]]
            texts[kind] = texts.get(kind, "") + event["delta"]["partial_json" if kind == "tool_use" else "text"]
    assert texts == {"tool_use": '{"a": 1}', "text": " Done."}

    form = ResponsesFormat(OPTIONS, NO_TOKENIZER, [FormatParser(read_hermes)], {})
    _streamed(form, *cut)
    assert form.response is not None
    shown = sorted(str(item.get("arguments") or item["content"][0]["text"]) for item in form.response["output"])
    assert shown == [" Done.", '{"a": 1}']

    lines = _streamed(OllamaFormat(OPTIONS, NO_TOKENIZER, [FormatParser(read_hermes)], chat=True), *cut)
    assert "".join(line["message"]["content"] for line in lines) == " Done."
    assert [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]] == [
        [{"function": {"name": "f", "arguments": {"a": 1}}}]
    ]


ANSWER = (
    'Hm. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> Then.<tool_call>{"name": "g"}</tool_call> Done.'
)


@pytest.mark.parametrize("cut", [(ANSWER,), tuple(ANSWER)])
def test_streams_and_whole_answers_have_the_same_items_in_the_order_of_the_text(cut: tuple[str, ...]) -> None:
    order = ["Hm.", ("f", '{"a": 1}'), " Then.", ("g", "{}"), " Done."]
    items: list[Any] = []
    for event in _streamed(MessagesFormat(OPTIONS, NO_TOKENIZER, [FormatParser(read_hermes)]), *cut):
        if event["type"] == "content_block_start":
            items.append((event["content_block"].get("name"), ""))
        elif event["type"] == "content_block_delta":
            name, text = items[-1]
            items[-1] = (name, text + (event["delta"].get("text") or event["delta"].get("partial_json")))
    assert [text if name is None else (name, text) for name, text in items] == order

    deltas = [Delta(text, [1], None) for text in cut]
    message = MessagesFormat(OPTIONS, NO_TOKENIZER, [FormatParser(read_hermes)]).whole([ENDED], [deltas])
    blocks = message["content"]
    assert [block.get("text") or (block["name"], json.dumps(block["input"])) for block in blocks] == order

    streamed, whole = (ResponsesFormat(OPTIONS, NO_TOKENIZER, [FormatParser(read_hermes)], {}) for _ in range(2))
    _streamed(streamed, *cut)
    response = whole.whole([ENDED], [deltas])
    shown = [
        item["content"][0]["text"] if "content" in item else (item["name"], item["arguments"])
        for item in response["output"]
    ]
    assert shown == order
    assert streamed.response is not None
    ids = [{**item, "call_id": ""} for item in streamed.response["output"]]
    assert ids == [{**item, "call_id": ""} for item in response["output"]]


def test_messages_of_gpt_oss_that_are_items_of_their_own_need_no_line_break() -> None:
    answer = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Well.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>So.<|end|><|start|>assistant<|channel|>analysis<|message|>Ah.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    )
    encode = SimpleNamespace(encode=lambda text, add_special_tokens: [0])  # pyright: ignore[reportUnknownLambdaType]
    texts = ["Hm.", "Well.\nSo.", "Ah.", "Yes."]
    deltas = [[Delta(answer, [1], None)]]
    form = ResponsesFormat(OPTIONS, cast("Any", encode), [FormatParser(partial(read_harmony, ()))], {})
    assert [item["content"][0]["text"] for item in form.whole([ENDED], deltas)["output"]] == texts
    message = MessagesFormat(OPTIONS, NO_TOKENIZER, [FormatParser(partial(read_harmony, ()))]).whole([ENDED], deltas)
    assert [block.get("text") or block["thinking"] for block in message["content"]] == texts
    streamed = _streamed(MessagesFormat(OPTIONS, NO_TOKENIZER, [FormatParser(partial(read_harmony, ()))]), *answer)
    assert sum(event["type"] == "content_block_start" for event in streamed) == 4


@pytest.mark.parametrize("text", ['{"a": 1', "[1]", '{"a": NaN}', '{"a": -Infinity}', '{"a": [1e999]}'])
def test_arguments_that_are_no_json_object_stay_text(text: str) -> None:
    assert arguments_object(text) == {"partial_json": text}


@pytest.mark.parametrize(
    ("arguments", "complete"),
    [('{"a": 1, "b": "x', {"a": 1}), ('{"a": [1, {"b": tr', {"a": [1, {}]}), ("{", {}), ('{"a": 1, b', None)],
)
@pytest.mark.parametrize("outcome", [Outcome("length"), Outcome("stop", "x"), Outcome("stop")])
def test_a_call_that_is_cut_off_has_what_is_complete_as_clients_read_it_of_a_stream(
    outcome: Outcome, arguments: str, complete: Any
) -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + arguments
    generation = cast("Any", SimpleNamespace(**{**vars(ENDED), "outcome": outcome}))
    message = MessagesFormat(OPTIONS, NO_TOKENIZER, [FormatParser(read_hermes)]).whole(
        [generation], [[Delta(text, [1], None)]]
    )
    as_written = {"partial_json": arguments}
    cut_off = outcome != Outcome("stop") and complete is not None
    assert message["content"][0]["input"] == (complete if cut_off else as_written)


@pytest.mark.parametrize(("text", "found"), [("", {}), ('{"a": [1, 1e308]}', {"a": [1, 1e308]})])
def test_arguments_are_an_object(text: str, found: Any) -> None:
    assert arguments_object(text) == found


def test_reasoning_is_counted_as_it_arrives() -> None:
    """Not at the end, where 100,000 characters took a tenth of a second of the event loop."""
    encoded: list[str] = []

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return [0] * text.count(" ")

    form = ResponsesFormat(OPTIONS, cast("Any", SimpleNamespace(encode=encode)), [FormatParser(THINK)], {})
    ended = cast("Any", SimpleNamespace(**{**vars(ENDED), "completion_tokens": 30_000}))
    for text in ["<think>why", *[" and", " so"] * 10_000, " longer" * 500, "</think>", "yes"]:
        form.delta(Delta(text, [1], None), 0)
    assert max(map(len, encoded)) < 5_000
    form.closing(ended, 0, Delta("", [], None))
    assert len(encoded[-1]) < 1_100
    assert "".join(encoded).count(" ") == 20_500
    assert form.response is not None
    assert form.response["usage"]["output_tokens_details"]["reasoning_tokens"] == 20_500
