"""`/v1/messages` as Anthropic's clients use it, with scripted nodes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_bench import Bench, play, script_of
from support.stub_node import MAX_LEN
from support.tool_model import CALLS, VOCAB_SIZE, make_tool_model
from tokenizers import Tokenizer

TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("weather", "time")]
ASKED: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": "Paris?"}]}
HISTORY: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Paris?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "And?"},
        ],
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("messages") / "stub-model")


def _play(
    folder: Path,
    answer: str,
    scene: Callable[[Bench, httpx.AsyncClient], Awaitable[None]],
    *,
    end: bool = True,
    **config: Any,
) -> None:
    async def with_http(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url, timeout=20) as http:
            await scene(bench, http)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    script = script_of(answer, tokenizer, end=end)
    play(folder, with_http, script=script, vocab_size=VOCAB_SIZE, config=config)


def _events(body: str) -> list[Any]:
    """The data of each event; its name is its type."""
    events: list[Any] = []
    for event in body.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    return events


def test_an_answer_with_calls_has_the_same_blocks_whole_and_streamed(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        whole = (await http.post("/v1/messages", json={**ASKED, "tools": TOOLS, "model": "stub-model"})).json()
        text, weather, time = whole["content"]
        assert text["type"] == "text"
        assert text["text"].startswith("Let me look.")
        assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "weather", {"city": "Zürich"})
        assert (time["name"], time["input"]) == ("time", {})
        assert (whole["stop_reason"], whole["stop_sequence"], whole["role"]) == ("tool_use", None, "assistant")
        count = await http.post("/v1/messages/count_tokens", json={"messages": ASKED["messages"], "tools": TOOLS})
        assert whole["usage"]["input_tokens"] == count.json()["input_tokens"]

        events = _events((await http.post("/v1/messages", json={**ASKED, "tools": TOOLS, "stream": True})).text)
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "ping"]
        assert kinds[-2:] == ["message_delta", "message_stop"]
        blocks: list[Any] = []
        for event in events:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(blocks)
                    blocks.append({**event["content_block"], "more": ""})
                case "content_block_delta":
                    assert event["index"] == len(blocks) - 1
                    delta = event["delta"]
                    blocks[-1]["more"] += delta.get("text", "") + delta.get("partial_json", "")
                case _:
                    pass
        assert kinds.count("content_block_stop") == len(blocks) == 3
        assert blocks[0]["more"] == text["text"]
        assert [json.loads(block["more"]) for block in blocks[1:]] == [weather["input"], time["input"]]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        assert events[-2]["usage"] == whole["usage"]

    _play(folder, CALLS, scene)


def test_reasoning_is_a_thinking_block_and_a_stop_sequence_is_named(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        body = {**ASKED, "stop_sequences": ["END"]}
        whole = (await http.post("/v1/messages", json=body)).json()
        assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
        events = _events((await http.post("/v1/messages", json={**body, "stream": True})).text)
        starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert starts == ["thinking", "text"]
        short = (await http.post("/v1/messages", json={**ASKED, "max_tokens": 1})).json()
        assert short["stop_reason"] == "max_tokens"

    _play(folder, "<think>hm</think>yes END no", scene)


def test_an_answer_may_fill_the_context_and_says_so(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        many = {**ASKED, "max_tokens": 64_000}
        whole = (await http.post("/v1/messages", json=many)).json()
        assert whole["stop_reason"] == "model_context_window_exceeded"
        usage = whole["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == MAX_LEN
        events = _events((await http.post("/v1/messages", json={**many, "stream": True})).text)
        assert events[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"
        room = {**ASKED, "max_tokens": usage["output_tokens"]}
        assert (await http.post("/v1/messages", json=room)).json()["stop_reason"] == "max_tokens"
        long: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * MAX_LEN}]}
        refused = await http.post("/v1/messages", json={**ASKED, **long})
        count = (await http.post("/v1/messages/count_tokens", json=long)).json()["input_tokens"]
        said = f"prompt is too long: {count} tokens > {MAX_LEN - 1} maximum"
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, said)

    _play(folder, "sun", scene, end=False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_of_no_tokens_computes_the_prompt_alone(folder: Path, stream: bool) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/messages", json={**ASKED, "max_tokens": 0, "stream": stream})
        if stream:
            events = _events(answer.text)
            kinds = [event["type"] for event in events]
            assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
            last = {**events[0]["message"], **events[-2]["delta"], "usage": events[-2]["usage"]}
        else:
            last = answer.json()
        assert (last["content"], last["stop_reason"], last["usage"]["output_tokens"]) == ([], "max_tokens", 0)

    _play(folder, "sun", scene)


def test_the_history_reaches_the_template_in_order(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        body = {
            **ASKED,
            "messages": HISTORY,
            "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
        }
        assert (await http.post("/v1/messages", json=body)).status_code == 200
        ids = bench.decode.requests()[-1].token_ids
        prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids, skip_special_tokens=False)
        assert prompt == (
            "<|system|>Be\nbrief</s><|user|>Paris?</s>"
            '<|assistant|>I look.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call></s>'
            "<|tool|>rain</s><|user|>And?</s><|assistant|>"
        )

    _play(folder, "sun", scene)


def test_errors_have_anthropics_shape_and_its_header_is_a_key(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        key = {"x-api-key": "secret"}
        image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        unknown_type = {"format": {"type": "json_schema", "schema": {"type": "typo"}}}
        for body, headers, status, kind, said in (
            (ASKED, {}, 401, "authentication_error", "API key"),
            (ASKED | {"model": "other"}, key, 404, "not_found_error", "other"),
            (ASKED | {"max_tokens": None}, key, 400, "invalid_request_error", "max_tokens"),
            (ASKED | {"messages": image}, key, 400, "invalid_request_error", "image"),
            (
                ASKED | {"output_config": unknown_type},
                key,
                400,
                "invalid_request_error",
                "output_config.format: the grammar",
            ),
            (
                ASKED | {"tools": [{"type": "bash_20250124", "name": "bash"}]},
                key,
                400,
                "invalid_request_error",
                "tools",
            ),
        ):
            refused = await http.post("/v1/messages", json=body, headers=headers)
            assert refused.status_code == status
            error = refused.json()
            assert (error["type"], error["error"]["type"]) == ("error", kind)
            assert said in error["error"]["message"]
        assert (await http.post("/v1/messages", json=ASKED, headers=key)).status_code == 200
        assert (await http.get("/v1/messages", headers=key)).json()["type"] == "error"
        bench.prefill.fail_with = bench.decode.fail_with = ("engine_error", "scripted")
        failed = await http.post("/v1/messages", json=ASKED, headers=key)
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")

    _play(folder, "sun", scene, api_key="secret")


def test_every_answer_has_the_header_in_which_clients_look_for_its_id(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        seen: set[str] = set()
        key = {"x-api-key": "secret", "x-request-id": "mine"}
        for path, body, headers, status in (
            ("", ASKED, key, 200),
            ("", ASKED | {"stream": True}, key, 200),
            ("/count_tokens", {"messages": ASKED["messages"]}, key, 200),
            ("", ASKED, {}, 401),
            ("", {}, key, 400),
            ("/count_tokens", {}, key, 400),
            ("", ASKED | {"model": "other"}, key, 404),
            ("/batches", {}, key, 404),
        ):
            answer = await http.post(f"/v1/messages{path}", json=body, headers=headers)
            assert answer.status_code == status
            (request_id,) = answer.headers.get_list("request-id")
            assert request_id.startswith("msg_")
            assert answer.headers["x-request-id"] == headers.get("x-request-id", request_id)
            seen.add(request_id)
        assert len(seen) == 8
        bench.prefill.fail_with = bench.decode.fail_with = ("engine_error", "scripted")
        failed = await http.post("/v1/messages", json=ASKED, headers=key)
        assert failed.headers["request-id"] == failed.headers["x-kvrelay-request-id"]

    _play(folder, "sun", scene, api_key="secret")


def test_clients_of_anthropic_get_the_models_in_its_shape(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        version = {"anthropic-version": "2023-06-01"}
        page = (await http.get("/v1/models", headers=version)).json()
        (model,) = page.pop("data")
        assert page == {"has_more": False, "first_id": "stub-model", "last_id": "stub-model"}
        created = datetime.fromisoformat(model.pop("created_at"))
        assert abs((datetime.now(UTC) - created).total_seconds()) < 3600
        assert model == {
            "type": "model",
            "id": "stub-model",
            "display_name": "stub-model",
            "max_input_tokens": MAX_LEN,
            "max_tokens": MAX_LEN,
        }
        one = (await http.get("/v1/models/stub-model", headers=version)).json()
        assert (one["type"], one["id"]) == ("model", "stub-model")
        assert (await http.get("/v1/models/other", headers=version)).status_code == 404
        assert (await http.get("/v1/models")).json()["object"] == "list"

    _play(folder, "sun", scene)
