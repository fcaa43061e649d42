"""Tools with chat templates that show none, or whose format is not known, with scripted nodes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_bench import Bench, play, script_of
from support.stub_node import make_model_folder
from tokenizers import Tokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")]
USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "sun"}
TURNS = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, {**RESULT, "content": "rain"}]
TEMPLATES = {
    "alternating": "{% for m in messages %}{% if m.role != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
    "of other roles": "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}<|assistant|>",
}
OWN_FORMAT = "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "time"}}


def _play(tmp_path: Path, template: str, scene: Callable[[Bench, Any], Awaitable[None]], **config: Any) -> None:
    folder = make_model_folder(tmp_path / "stub-model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    sizes = folder / "config.json"
    sizes.write_text(json.dumps({**json.loads(sizes.read_text()), "max_position_embeddings": 4096}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def scene_of_client(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:

            async def ask(**fields: Any) -> tuple[httpx.Response, str]:
                body = {"messages": [USER], "tools": TOOLS, **fields}
                answer = await client.post("/v1/chat/completions", json=body)
                requests = bench.decode.requests()
                return answer, tokenizer.decode(requests[-1].token_ids, skip_special_tokens=False) if requests else ""

            await scene(bench, ask)

    play(folder, scene_of_client, max_len=4096, script=script_of(WRITTEN, tokenizer), config=config)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_that_a_template_does_not_show_are_described_and_called(tmp_path: Path, name: str) -> None:
    async def scene(bench: Bench, ask: Any) -> None:
        for fields in ({}, {"tool_choice": "required"}, {"tool_choice": NAMED}):
            answer, prompt = await ask(**fields)
            assert answer.status_code == 200, answer.text
            (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                "weather",
                {"city": "Paris"},
            )
            assert "tools described in the system message" in answer.headers["x-kvrelay-fitted"]
            assert json.dumps(TOOLS[0]["function"]) in prompt
            assert "<tool_call>" in prompt
            grammar = bench.decode.requests()[-1].request.sampling.grammar
            assert (grammar is not None) is bool(fields)
        assert '"time' in grammar.source
        assert '"weather' not in grammar.source
        plain, prompt = await ask(tool_choice="none")
        assert plain.headers.get("x-kvrelay-fitted") is None
        assert "<tool_call>" not in prompt

    _play(tmp_path, TEMPLATES[name], scene)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_results_that_a_template_does_not_show_are_text_and_earlier_turns_stay(
    tmp_path: Path, name: str
) -> None:
    async def scene(bench: Bench, ask: Any) -> None:
        prompts: list[str] = []
        for messages in (TURNS, [*TURNS, {"role": "assistant", "content": "Sun."}, USER]):
            answer, prompt = await ask(messages=messages, tools=None)
            assert answer.status_code == 200, answer.text
            assert "calls of tools and their results shown as text" in answer.headers["x-kvrelay-fitted"]
            prompts.append(prompt)
        assert (
            f"<|assistant|>{WRITTEN}<|user|><tool_response>\nsun\n</tool_response>\n<tool_response>\nrain" in prompts[0]
        )
        assert prompts[1].startswith(prompts[0])

    _play(tmp_path, TEMPLATES[name], scene)


def test_a_template_whose_format_is_not_known_takes_forced_calls(tmp_path: Path) -> None:
    async def scene(bench: Bench, ask: Any) -> None:
        refused, _ = await ask()
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        for word in ("format of this model's tool calls is not known", "'required'", "--tool-call-parser NAME"):
            assert word in message
        answer, prompt = await ask(tool_choice="required")
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert "To call a function" not in prompt
        assert "x-kvrelay-fitted" not in answer.headers

    _play(tmp_path, OWN_FORMAT, scene)


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    async def scene(bench: Bench, ask: Any) -> None:
        refused, _ = await ask()
        message = refused.json()["error"]["message"]
        for word in (
            "has no place for tools",
            "format of this model's tool calls is not known",
            "--chat-template FILE",
            "--fit-conversations true",
            "--tool-call-parser NAME",
        ):
            assert word in message, message
        fine, _ = await ask(tool_choice="none")
        assert fine.status_code == 200

    _play(tmp_path, TEMPLATES["alternating"], scene, fit_conversations=False)
