"""The addresses beside the completion calls: tokenizing, state, several names, browsers (CORS), the page of documents."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
from support.router_bench import Bench, play
from tokenizers import Tokenizer

from router.http.key_limits import LIMIT_HEADERS
from router.text.tokenizer import Tokenizer as ServedTokenizer


def test_tokenize_and_detokenize_agree_with_the_tokenizer_and_with_the_calls(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            ids = tokenizer.encode("the quick fox").ids
            shown = (await http.post("/tokenize", json={"prompt": "the quick fox", "return_token_strs": True})).json()
            assert shown == {
                "count": len(ids),
                "max_model_len": 512,
                "tokens": ids,
                "token_strs": [tokenizer.id_to_token(each) for each in ids],
            }
            text = await http.post("/detokenize", json={"model": "stub-model", "tokens": [*ids, 1]})
            assert text.json() == {"prompt": "the quick fox</s>"}

            messages = [{"role": "user", "content": "hi"}]
            chat = (await http.post("/tokenize", json={"messages": messages, "model": "stub-model"})).json()
            whole = await http.post("/v1/chat/completions", json={"messages": messages, "return_token_ids": True})
            assert chat["tokens"] == whole.json()["prompt_token_ids"]
            assert (await http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []

            for path, body, param in (
                ("/tokenize", {}, "prompt"),
                ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
                ("/tokenize", {"messages": []}, "messages"),
                ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
                ("/detokenize", {"tokens": [400]}, "tokens"),
                ("/detokenize", {"tokens": [-1]}, "tokens"),
                ("/detokenize", {}, "tokens"),
            ):
                refused = await http.post(path, json=body)
                assert (refused.status_code, refused.json()["error"]["param"]) == (
                    404 if param == "model" else 400,
                    param,
                )

    play(model_folder, scene)


def test_a_long_text_is_tokenized_and_shown_on_a_thread(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []
    token_str = ServedTokenizer.token_str

    def noting(self: ServedTokenizer, token_id: int) -> str:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return token_str(self, token_id)

    monkeypatch.setattr(ServedTokenizer, "token_str", noting)

    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            for prompt, wanted in (("fox", True), ("fox " * 5000, False)):
                on_loop.clear()
                shown = (await http.post("/tokenize", json={"prompt": prompt, "return_token_strs": True})).json()
                assert len(shown["token_strs"]) == shown["count"]
                assert set(on_loop) == {wanted}

    play(model_folder, scene)


def test_state_is_shown_and_every_get_answers_head(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            assert (await http.get("/ready")).json() == {"ready": True}
            assert (await http.get("/load")).json() == {"server_load": 0}
            info = (await http.get("/server_info")).json()
            assert info["nodes"] == {"prefill": 1, "decode": 1, "pooling": 0}
            assert info["settings"]["policy"] == "kv_aware"
            assert "api_key" not in info["settings"]
            page = (await http.get("/docs")).text
            assert "openapi.json" in page
            assert "https://" not in page
            for path in ("/health", "/ready", "/load", "/ping", "/version", "/metrics", "/docs", "/v1/models"):
                head = await http.head(path)
                assert (head.status_code, head.content) == (200, b""), path
            bench.stack.list_nodes()
            assert (await http.get("/ready")).status_code == 503

    play(model_folder, scene)


def test_a_model_answers_to_each_of_its_names(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        assert [model.id for model in (await bench.client.models.list()).data] == ["main", "other/name"]
        for name, said in (("main", "main"), ("other/name", "other/name"), (None, "main")):
            async with httpx.AsyncClient(base_url=bench.stack.url) as http:
                body = {"prompt": "hi", "max_tokens": 2} | ({} if name is None else {"model": name})
                assert (await http.post("/v1/completions", json=body)).json()["model"] == said
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            missing = await http.post("/v1/completions", json={"prompt": "hi", "model": "stub-model"})
            assert missing.status_code == 404
            assert (await http.get("/v1/models/other/name")).json()["id"] == "other/name"
            counted = (await http.get("/metrics")).text
        assert 'vllm:request_success_total{finished_reason="length",model_name="main"} 3.0' in counted

    play(model_folder, scene, config={"served_model_name": "main, other/name"})


def test_scripts_of_allowed_pages_reach_the_api_and_read_its_errors(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            ask = {
                "origin": "https://app.example",
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,x-stainless-os",
            }
            preflight = await http.options("/v1/chat/completions", headers=ask)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == "https://app.example"
            assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
            for path, key, status in (
                ("/v1/chat/completions", "wrong", 401),
                ("/v1/chat/completions", "key", 400),
                ("//v1/chat/completions", "wrong", 401),
                ("///v1/chat/completions", "key", 400),
                ("/v1/nothing", "key", 404),
            ):
                headers = {"origin": "https://app.example", "authorization": f"Bearer {key}"}
                answer = await http.post(f"{bench.stack.url}{path}", json={}, headers=headers)
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == "https://app.example"
            body = {"prompt": "hi", "max_tokens": 2, "unheard_of": 1}
            headers = {"origin": "https://app.example", "authorization": "Bearer key"}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            own = {name for name in answer.headers if name.startswith("x-kvrelay-")}
            assert len(own) >= 10
            assert own | set(LIMIT_HEADERS) <= set(exposed)
            ask["origin"] = "https://else.example"
            assert (await http.options("/v1/chat/completions", headers=ask)).status_code == 400

    play(model_folder, scene, config={"api_key": "key", "allowed_origins": '["https://app.example"]'})


def test_without_allowed_origins_no_page_is_allowed(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            answer = await http.get("/v1/models", headers={"origin": "https://app.example"})
            assert "access-control-allow-origin" not in answer.headers

    play(model_folder, scene)
