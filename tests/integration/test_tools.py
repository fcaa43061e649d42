"""Tools and reasoning through the official client, with scripted nodes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from support.router_bench import Bench, play, script_of
from support.tool_model import CALLS, VOCAB_SIZE, make_tool_model
from tokenizers import Tokenizer

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {}}}}}
    for name in ("weather", "time")
]
ASKED: Any = [{"role": "user", "content": "Paris?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("tools") / "stub-model")


def _play(folder: Path, answer: str, scene: Callable[[Bench], Awaitable[None]], **config: Any) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    play(folder, scene, script=script_of(answer, tokenizer), vocab_size=VOCAB_SIZE, config=config)


def _prompt(bench: Bench, folder: Path) -> str:
    ids = bench.decode.requests()[-1].token_ids
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids, skip_special_tokens=False)


def _functions(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_are_answered_whole_and_streamed_alike(folder: Path) -> None:
    want = [("weather", {"city": "Zürich"}), ("time", {})]

    async def scene(bench: Bench) -> None:
        create = bench.client.chat.completions.create
        whole = (await create(model="stub-model", messages=ASKED, tools=TOOLS)).choices[0]
        assert (whole.message.content, whole.finish_reason) == ("Let me look.", "tool_calls")
        assert _functions(whole.message) == want
        assert json.dumps(TOOLS[0], ensure_ascii=False) in _prompt(bench, folder)

        stream = bench.client.chat.completions.stream(model="stub-model", messages=ASKED, tools=TOOLS)
        async with stream as events:
            deltas = [event async for event in events if event.type == "tool_calls.function.arguments.delta"]
            final = (await events.get_final_completion()).choices[0]
        assert len(deltas) > 3
        assert (final.message.content, final.finish_reason) == ("Let me look.", "tool_calls")
        assert _functions(final.message) == want
        assert all(call.id.startswith("call_") for call in final.message.tool_calls or ())

        one = await create(model="stub-model", messages=ASKED, tools=TOOLS, parallel_tool_calls=False)
        assert _functions(one.choices[0].message) == want[:1]

    _play(folder, CALLS, scene)


def test_pydantic_arguments_are_parsed_by_the_client(folder: Path) -> None:
    class Weather(pydantic.BaseModel):
        city: str

    async def scene(bench: Bench) -> None:
        tools = [openai.pydantic_function_tool(Weather, name="weather")]
        answer = await bench.client.chat.completions.parse(model="stub-model", messages=ASKED, tools=tools)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == Weather(city="Zürich")

    _play(folder, CALLS.rpartition("\n<tool_call>")[0], scene)


def test_a_conversation_with_tool_results_goes_on(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        create = bench.client.chat.completions.create
        first = await create(model="stub-model", messages=ASKED, tools=TOOLS)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "20 </s>"}
            for call in first.choices[0].message.tool_calls or ()
        ]
        messages: Any = [*ASKED, first.choices[0].message.model_dump(exclude_none=True), *results]
        await create(model="stub-model", messages=messages, tools=TOOLS)
        prompt = _prompt(bench, folder)
        assert '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>' in prompt
        assert prompt.count("<|tool|>20 </s></s>") == 2
        ids = bench.decode.requests()[-1].token_ids
        end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("</s>")
        assert ids.count(end) == 4  # one for each message; those in the results are text

    _play(folder, CALLS, scene)


def test_without_tools_the_text_is_content(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = await bench.client.chat.completions.create(model="stub-model", messages=ASKED, **fields)
            assert answer.choices[0].message.content == "plain"
            assert answer.choices[0].finish_reason == "stop"
            assert '"type"' not in _prompt(bench, folder)

    _play(folder, "plain", scene)


def test_reasoning_comes_in_a_field_of_its_own(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        extra = {"chat_template_kwargs": {"thinking": True}}
        create = bench.client.chat.completions.create
        whole = await create(model="stub-model", messages=ASKED, tools=TOOLS, extra_body=extra)
        message: Any = whole.choices[0].message
        assert message.reasoning_content == message.reasoning == "Hm, Paris."
        assert (message.content, _functions(message)) == (
            "Let me look.",
            [("weather", {"city": "Zürich"}), ("time", {})],
        )
        reasoning = content = ""
        async for chunk in await create(model="stub-model", messages=ASKED, stream=True, extra_body=extra):
            delta: Any = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            content += delta.content or ""
        assert reasoning == "Hm, Paris."
        assert content.startswith("Let me look.\n")

    _play(folder, f"Hm, Paris.\n</think>\n\n{CALLS}", scene)


def test_the_operator_can_turn_the_parsers_off(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url + "/v1/") as http:
            answer = await http.post("chat/completions", json={"messages": ASKED, "tools": TOOLS})
            assert answer.status_code == 400
            assert "(--tool-call-parser none); send tool_choice='none'" in answer.json()["error"]["message"]
        plain = await bench.client.chat.completions.create(model="stub-model", messages=ASKED)
        assert plain.choices[0].message.content == "Hm</think>Yes"

    _play(folder, "Hm</think>Yes", scene, tool_call_parser="none", reasoning_parser="none")


def test_a_forced_call_reaches_the_nodes_as_a_grammar(folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async def grammar(**fields: Any) -> Any:
            create: Any = bench.client.chat.completions.create
            await create(model="stub-model", messages=ASKED, tools=TOOLS, **fields)
            return bench.decode.requests()[-1].request.sampling.grammar

        assert await grammar() is None
        assert await grammar(tool_choice="none") is None
        required = await grammar(tool_choice="required")
        assert required.after == []
        assert "<[300]>" in required.source
        assert '"weather"' in required.source
        assert '"time"' in required.source
        named = await grammar(tool_choice={"type": "function", "function": {"name": "time"}})
        assert '"weather"' not in named.source
        assert "OTHER_TEXT" not in named.source
        strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
        assert "OTHER_TEXT" in (await grammar(extra_body={"tools": strict})).source

        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        either = (await grammar(response_format=form)).source
        assert "@otherwise" in either
        assert '"weather' in either.replace("\\", "")
        assert "@otherwise" not in (await grammar(response_format=form, tool_choice="none")).source
        assert "@otherwise" not in (await grammar(response_format=form, tool_choice="required")).source

        wrong: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
        create: Any = bench.client.chat.completions.with_raw_response.create
        relaxed = await create(model="stub-model", messages=ASKED, tools=wrong, tool_choice="required")
        assert relaxed.headers["x-kvrelay-relaxed"] == "f.parameters"
        wrong[0]["function"]["strict"] = True
        with pytest.raises(openai.BadRequestError, match="parameters of f must be of type object"):
            await create(model="stub-model", messages=ASKED, tools=wrong, tool_choice="required")

    _play(folder, CALLS, scene)


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("prefill", "answer", "reasoning", "content"),
    [("Hello, I", " am here", None, " am here"), ("<think>hm", " so</think>yes", " so", "yes")],
)
def test_an_answer_that_continues_a_message_goes_on_with_its_reasoning_or_its_content(
    folder: Path, parser: str, prefill: str, answer: str, reasoning: str | None, content: str
) -> None:
    async def scene(bench: Bench) -> None:
        said = await bench.client.chat.completions.create(
            model="stub-model",
            messages=[*ASKED, {"role": "assistant", "content": prefill}],
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        message = said.choices[0].message.model_dump()
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
        assert _prompt(bench, folder).endswith(f"<|assistant|>{prefill}")

    _play(folder, answer, scene, reasoning_parser=parser)
