"""What vLLM's own client tests ask for by name, with scripted nodes: one test for each name."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_bench import Bench, play
from support.stub_node import make_model_folder

PROMPT = {"prompt": "hi", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
Ask = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("names") / "stub-model")


def _play(folder: Path, scene: Callable[[httpx.AsyncClient, Bench], Awaitable[None]], **config: Any) -> None:
    async def with_client(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            await scene(http, bench)

    play(folder, with_client, config=config)


async def _chunks(http: httpx.AsyncClient, path: str, body: Any) -> list[Any]:
    text = (await http.post(path, json={**body, "stream": True})).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_enable_force_include_usage(folder: Path) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            usages = [chunk.get("usage") for chunk in await _chunks(http, path, body)]
            assert usages[-1]["completion_tokens"] == 3
            assert not any(usages[:-1])

    _play(folder, scene, enable_force_include_usage=True)


def test_return_tokens_as_token_ids(folder: Path) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        body = {**PROMPT, "logprobs": 1}
        by_option = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]["tokens"]
        assert all(token.startswith("token_id:") for token in by_option)
        asked = {**body, "return_tokens_as_token_ids": False}
        by_request = (await http.post("/v1/completions", json=asked)).json()["choices"][0]["logprobs"]["tokens"]
        assert not any(token.startswith("token_id:") for token in by_request)

    _play(folder, scene, return_tokens_as_token_ids=True)


def test_root_path(folder: Path) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        for path in ("/llm/v1/completions", "/v1/completions"):
            assert (await http.post(path, json=PROMPT)).status_code == 200, path
        for path in ("/llm/health", "/llm", "/llm/", "/health"):
            assert (await http.get(path)).status_code == 200, path
        for path in ("/llmv1/completions", "/other/v1/completions"):
            assert (await http.post(path, json=PROMPT)).status_code == 404, path
        assert {"url": "/llm"} in (await http.get("/openapi.json")).json()["servers"]

    _play(folder, scene, root_path="/llm")


def test_tokenizer_info(folder: Path) -> None:
    async def shown(http: httpx.AsyncClient, bench: Bench) -> None:
        found = (await http.get("/tokenizer_info")).json()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        assert found["tokenizer_class"] == config["tokenizer_class"]
        assert found["chat_template"] == config["chat_template"]
        assert found["eos_token"] == "</s>"

    async def hidden(http: httpx.AsyncClient, bench: Bench) -> None:
        refused = await http.get("/tokenizer_info")
        assert (refused.status_code, "--enable-tokenizer-info-endpoint" in refused.text) == (404, True)

    _play(folder, shown, enable_tokenizer_info_endpoint=True)
    _play(folder, hidden)


def test_the_wrong_key_of_logit_bias_is_named(folder: Path) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        for key in ("five", "407"):
            refused = await http.post("/v1/completions", json={**PROMPT, "logit_bias": {"1": 1, key: 1}})
            assert (refused.status_code, key in refused.json()["error"]["message"]) == (400, True)

    _play(folder, scene)


def test_the_chosen_token_is_first_in_logprobs(folder: Path) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        found = (await http.post("/v1/completions", json={**PROMPT, "logprobs": 2})).json()["choices"][0]["logprobs"]
        for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
            assert next(iter(top)) == token

    _play(folder, scene)


@pytest.mark.parametrize(
    ("bound", "asked", "said"),
    [
        (20, -1, "Requested sample logprobs of 400, which is greater than max allowed: 20"),
        (20, 21, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        (399, -1, "greater than max allowed: 399"),
        (-1, 1025, "1024"),
        (-1, 300, None),
        (400, -1, "at most 5242 positions of a request; this one may have 5500"),
    ],
)
def test_max_logprobs(folder: Path, bound: int, asked: int, said: str | None) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        many = {"prompt": ["hi"] * 50, "n": 5, "max_tokens": 22}
        calls = {"/v1/completions": {**PROMPT, **(many if bound == 400 else {}), "logprobs": asked}}
        if bound != 400:
            calls["/v1/chat/completions"] = {**CHAT, "logprobs": True, "top_logprobs": asked}
        for path, body in calls.items():
            answer = await http.post(path, json=body)
            if said is None:
                assert answer.status_code == 200
            else:
                assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text
        if said and asked == -1 and bound < 400:
            answer = await http.post("/v1/completions", json={**PROMPT, "prompt_logprobs": -1})
            assert said.replace("sample", "prompt") in answer.json()["error"]["message"]

    _play(folder, scene, max_logprobs=bound)


def test_logprob_token_ids(folder: Path) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            assert (await http.post(path, json={**body, "logprob_token_ids": [5, 7]})).status_code == 200
            sampling = bench.decode.requests()[-1].request.sampling
            assert (sampling.logprobs, sampling.logprob_token_ids) == (2, [5, 7])
            beyond = await http.post(path, json={**body, "logprob_token_ids": [400]})
            assert (beyond.status_code, "400" in beyond.json()["error"]["message"]) == (400, True)
            assert (await http.post(path, json={**body, "logprob_token_ids": list(range(21))})).status_code == 400

    _play(folder, scene)


def test_custom_roles(tmp_path: Path) -> None:
    any_role = make_model_folder(tmp_path / "stub-model")

    async def taken(http: httpx.AsyncClient, bench: Bench) -> None:
        turns = [{"role": "critic", "content": "no"}, *CHAT["messages"]]  # type: ignore[misc]
        assert (await http.post("/v1/chat/completions", json={**CHAT, "messages": turns})).status_code == 200

    async def refused(http: httpx.AsyncClient, bench: Bench) -> None:
        turns = [{"role": "critic", "content": "no"}, *CHAT["messages"]]  # type: ignore[misc]
        answer = await http.post("/v1/chat/completions", json={**CHAT, "messages": turns})
        assert (answer.status_code, "no role 'critic'" in answer.json()["error"]["message"]) == (400, True)

    _play(any_role, taken)
    file = any_role / "tokenizer_config.json"
    template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    _play(any_role, refused)


def test_metrics(folder: Path) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        await http.post("/v1/completions", json={**PROMPT, "n": 2})
        text = (await http.get("/metrics")).text
        for line in (
            'vllm:num_requests_waiting_by_reason{model_name="stub-model",node="d0",reason="capacity",role="decode"} 0.0',
            'vllm:num_requests_waiting_by_reason{model_name="stub-model",node="d0",reason="deferred",role="decode"} 0.0',
            'vllm:request_params_n_sum{model_name="stub-model"} 2.0',
            'vllm:request_params_max_tokens_sum{model_name="stub-model"} 6.0',
            'vllm:request_num_preemptions_count{model_name="stub-model"} 2.0',
            'vllm:request_inference_time_seconds_count{model_name="stub-model"} 2.0',
        ):
            assert line in text, line
        (info, *_) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
        for label in ("block_size=", "cache_dtype=", "num_gpu_blocks="):
            assert label in info

    _play(folder, scene)


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_log_probabilities_in_responses(folder: Path, fields: Any) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        body = {"input": "hi", "max_output_tokens": 3, "store": False, **fields}
        whole = (await http.post("/v1/responses", json=body)).json()
        (part,) = whole["output"][0]["content"]
        assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
        assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {fields.get("top_logprobs", 0)}
        events = await _chunks(http, "/v1/responses", body)
        streamed = [
            entry for each in events if each["type"] == "response.output_text.delta" for entry in each["logprobs"]
        ]
        assert streamed == part["logprobs"]
        assert events[-1]["response"]["output"][0]["content"] == [part]
        plain = (await http.post("/v1/responses", json={**body, "include": [], "top_logprobs": None})).json()
        assert plain["output"][0]["content"][0]["logprobs"] == []

    _play(folder, scene)


def test_use_beam_search(folder: Path) -> None:
    """The scripted nodes say after a token that those above it follow, each less likely than the one before."""

    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        body = {**PROMPT, "use_beam_search": True, "n": 2, "logprobs": 1, "return_token_ids": True}
        answer = await http.post("/v1/completions", json=body)
        first, second = answer.json()["choices"]
        assert [first["index"], second["index"]] == [0, 1]
        assert [first["finish_reason"], second["finish_reason"]] == ["length", "length"]
        assert len(first["token_ids"]) == len(second["token_ids"]) == 3
        totals = [sum(each["logprobs"]["token_logprobs"]) for each in (first, second)]
        assert totals[0] == -3.0
        assert totals[1] == -4.0
        used = answer.json()["usage"]
        assert used["completion_tokens"] == 6
        assert used["prompt_tokens"] == len(first["prompt_token_ids"])
        assert answer.headers["x-kvrelay-decode-node"]
        chat = (await http.post("/v1/chat/completions", json={**CHAT, "use_beam_search": True, "n": 2})).json()
        assert len(chat["choices"]) == 2
        for wrong, param in (
            ({"stream": True}, "stream"),
            ({"stop": "x"}, "stop"),
            ({"best_of": 3}, "best_of"),
            ({"n": 17}, "n"),
            ({"min_tokens": 2}, "min_tokens"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
        ):
            refused = await http.post("/v1/completions", json={**body, **wrong})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
            assert "beam" in refused.json()["error"]["message"]
        alone = await http.post("/v1/completions", json={**PROMPT, "length_penalty": 2.0})
        assert alone.json()["error"]["param"] == "length_penalty"

    _play(folder, scene)


def test_num_requests_rejected(folder: Path) -> None:
    async def scene(http: httpx.AsyncClient, bench: Bench) -> None:
        assert (await http.post("/v1/completions", json={**PROMPT, "prompt": "a " * 9000})).status_code == 400
        for _ in range(2):
            assert (await http.post("/v1/completions", json={**PROMPT, "n": 0})).status_code == 400
        assert (await http.post("/v1/completions", json={**PROMPT, "model": "other"})).status_code == 404
        assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200
        lines = (await http.get("/metrics")).text.splitlines()
        found = {line for line in lines if line.startswith("vllm:num_requests_rejected_total{")}
        assert found == {
            'vllm:num_requests_rejected_total{reason="context_length_exceeded"} 1.0',
            'vllm:num_requests_rejected_total{reason="invalid_request"} 2.0',
            'vllm:num_requests_rejected_total{reason="model_not_found"} 1.0',
        }

    _play(folder, scene)
