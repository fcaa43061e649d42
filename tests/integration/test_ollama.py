"""ollama's calls as its clients use them, with scripted nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_bench import Bench, play, script_of
from support.stub_node import MAX_LEN, make_model_folder
from support.tool_model import CALLS, TEMPLATE, VOCAB_SIZE, make_tool_model
from tokenizers import Tokenizer

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "time")]
ASKED: dict[str, Any] = {"model": "stub-model:latest", "messages": [{"role": "user", "content": "Paris?"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("ollama") / "stub-model")


def _play(
    folder: Path, answer: str, scene: Callable[[Bench, httpx.AsyncClient], Awaitable[None]], **options: Any
) -> None:
    async def with_http(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url, timeout=20) as http:
            await scene(bench, http)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    play(folder, with_http, script=script_of(answer, tokenizer), vocab_size=VOCAB_SIZE, **options)


def test_a_chat_with_calls_is_the_same_whole_and_in_lines(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        body = {**ASKED, "tools": TOOLS}
        whole = (await http.post("/api/chat", json={**body, "stream": False})).json()
        calls = [{"function": {"name": "weather", "arguments": {"city": "Zürich"}}}]
        assert whole["message"]["tool_calls"] == [*calls, {"function": {"name": "time", "arguments": {}}}]
        assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "stop", "stub-model")
        assert whole["eval_count"] == len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(CALLS).ids) + 1

        answer = await http.post("/api/chat", json=body)
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
        streamed = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert streamed == whole["message"]["tool_calls"]
        assert lines[-1]["prompt_eval_count"] == whole["prompt_eval_count"]
        for last in (whole, lines[-1]):  # clients divide the counts by these
            durations = last["prompt_eval_duration"], last["eval_duration"]
            assert min(durations) > 0
            assert sum(durations) == last["total_duration"]

    _play(folder, CALLS, scene)


def test_more_tokens_than_there_is_room_for_are_no_error(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        many: dict[str, Any] = {"stream": False, "options": {"num_predict": 100_000}}
        for path, body in (
            ("/api/chat", {**ASKED, **many}),
            ("/api/generate", {"prompt": "hi", **many}),
            ("/api/generate", {"prompt": "hi", "raw": True, **many}),
        ):
            assert (await http.post(path, json=body)).json()["done_reason"] == "stop", path
            asked = bench.decode.requests()[-1]
            assert len(asked.token_ids) + asked.request.sampling.max_tokens == MAX_LEN

    _play(folder, "yes", scene)


def test_a_prompt_is_answered_by_the_template_or_continued_as_it_is(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        body = {"prompt": "hi", "system": "Be brief", "stream": False, "options": {"num_predict": 60, "seed": 7}}
        said = (await http.post("/api/generate", json=body)).json()
        assert (said["thinking"], said["response"], said["done_reason"]) == ("hm", "yes", "stop")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        asked = bench.decode.requests()[-1]
        prompt = tokenizer.decode(asked.token_ids, skip_special_tokens=False)
        assert prompt == "<|system|>Be brief</s><|user|>hi</s><|assistant|>"
        assert (asked.request.sampling.max_tokens, asked.request.sampling.seed) == (60, 7)
        raw = await http.post("/api/generate", json={**body, "raw": True, "options": {"num_predict": 2}})
        assert raw.json()["done_reason"] == "length"
        assert bench.decode.requests()[-1].token_ids.tolist() == tokenizer.encode("hi").ids
        assert [model["name"] for model in (await http.get("/api/tags")).json()["models"]] == ["stub-model"]

    _play(folder, "<think>hm</think>yes", scene)


def test_models_are_listed_when_their_folder_is_gone(tmp_path: Path) -> None:
    folder = make_tool_model(tmp_path / "stub-model")
    changed_s = folder.stat().st_mtime

    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        shutil.rmtree(folder)
        listed = await http.get("/api/tags")
        assert listed.status_code == 200
        assert datetime.fromisoformat(listed.json()["models"][0]["modified_at"]).timestamp() == pytest.approx(changed_s)

    _play(folder, "sun", scene)


def test_a_client_that_only_loads_the_model_is_told_that_it_is_there(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        for path, body, said in (
            ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
            ("/api/generate", {"keep_alive": "5m"}, {"response": ""}),
        ):
            loaded = (await http.post(path, json={"model": "stub-model", **body})).json()
            del loaded["created_at"]
            assert loaded == {"model": "stub-model", **said, "done": True, "done_reason": "load"}
        assert bench.decode.requests() == []

    _play(folder, "sun", scene)


def test_a_model_is_shown_with_its_context_and_what_it_can_do(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        for body in ({"model": "stub-model"}, {"name": "stub-model:latest", "verbose": True}, {}):
            answer = await http.post("/api/show", json=body)
            assert "x-kvrelay-ignored" not in answer.headers
            shown = answer.json()
            assert shown["capabilities"] == ["completion", "tools", "thinking"]
            assert shown["template"] == TEMPLATE
            assert (shown["details"]["family"], shown["details"]["format"]) == ("llama", "safetensors")
            info = shown["model_info"]
            assert info[f"{info['general.architecture']}.context_length"] == MAX_LEN
        unknown = await http.post("/api/show", json={"model": "other"})
        assert (unknown.status_code, "other" in unknown.json()["error"]) == (404, True)

    _play(folder, "sun", scene)


def test_a_model_without_formats_only_completes(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "stub-model", vocab_size=VOCAB_SIZE)

    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        shown = (await http.post("/api/show", json={"model": "stub-model"})).json()
        assert shown["capabilities"] == ["completion"]

    _play(folder, "sun", scene)


def test_clients_learn_the_version_and_which_models_run(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        for path in ("/api/version", "/api/ps", "/api/tags"):
            assert (await http.get(path)).status_code == 401
        assert (await http.post("/api/show", json={"model": "stub-model"})).status_code == 401
        http.headers["authorization"] = "Bearer key"
        version = (await http.get("/api/version")).json()["version"]
        assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # what editors ask for
        (running,) = (await http.get("/api/ps")).json()["models"]
        assert (running["name"], running["model"], running["context_length"]) == ("stub-model", "stub-model", MAX_LEN)
        assert datetime.fromisoformat(running["expires_at"]) > datetime.now(UTC)
        assert running["size_vram"] == 0

    _play(folder, "sun", scene, config={"api_key": "key"}, api_key="key")


def test_errors_have_ollamas_shape(tmp_path: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        for path, body, status, said in (
            ("/api/chat", {**ASKED, "model": "other"}, 404, "other"),
            ("/api/chat", {"messages": [], "model": "other"}, 404, "other"),
            ("/api/chat", {**ASKED, "think": "high"}, 400, "think is not supported"),
            ("/api/chat", {**ASKED, "options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty: Input should be"),
            ("/api/chat", {**ASKED, "format": {"type": "typo"}}, 400, "format: the grammar"),
            ("/api/chat", {**ASKED, "options": {"mirostat": 1}}, 400, "mirostat"),
            ("/api/generate", {"prompt": "hi", "images": ["x"]}, 400, "images: images are not supported"),
            (
                "/api/chat",
                {"messages": [{**ASKED["messages"][0], "images": ["x"]}]},
                400,
                "messages.0.images: images are not supported",
            ),
        ):
            refused = await http.post(path, json=body)
            assert refused.status_code == status
            assert said in refused.json()["error"]

    _play(make_model_folder(tmp_path / "stub-model"), "sun", scene)  # its template knows nothing of thinking


def test_plain_calls_need_no_content_type_but_a_script_of_another_site_does(folder: Path) -> None:
    async def scene(bench: Bench, http: httpx.AsyncClient) -> None:
        body = json.dumps({**ASKED, "stream": False})
        form = {"content-type": "application/x-www-form-urlencoded"}
        text, other_site = {"content-type": "text/plain;charset=UTF-8"}, {"origin": "http://elsewhere"}
        for path, headers, status in (
            ("/api/chat", form, 200),
            ("/api/chat", text, 200),
            ("/api/chat", {}, 200),
            ("/api/chat", {**form, **other_site}, 415),
            ("/api/chat", {**text, **other_site}, 415),
            ("/api/chat", other_site, 415),
            ("/api/chat", {"content-type": "application/xml"}, 415),
            ("/v1/chat/completions", form, 415),
            ("/v1/chat/completions", {}, 415),
        ):
            assert (await http.post(path, content=body, headers=headers)).status_code == status, (path, headers)

    _play(folder, "yes", scene)
