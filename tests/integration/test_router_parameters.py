"""Parameters that change what an answer shows, through a real router with scripted nodes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_bench import LONG, Bench, play, script_of
from tokenizers import Tokenizer

FIELDS: dict[str, Any] = {"model": "stub-model", "max_tokens": 4}


async def post(bench: Bench, call: str = "completions", **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=bench.stack.url) as client:
        answer = await client.post(f"/v1/{call}", json={**FIELDS, **fields}, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def stream(bench: Bench, **fields: Any) -> list[Any]:
    created = await bench.client.completions.create(**{**FIELDS, "stream": True, **fields})
    return [chunk.choices[0] async for chunk in created]


def joined(logprobs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [each for part in logprobs for each in part[name]] for name in logprobs[0]}


@pytest.mark.parametrize("logprobs", [None, 2])
def test_echo_begins_with_the_prompt_whole_and_streamed_alike(
    model_folder: Path, tokenizer: Tokenizer, logprobs: int | None
) -> None:
    async def scene(bench: Bench) -> None:
        fields: dict[str, Any] = {"prompt": LONG, "logprobs": logprobs}
        whole = (await post(bench, **fields, echo=True))["choices"][0]
        assert whole["text"] == LONG + tokenizer.decode(tokenizer.encode("hello, world").ids[:4])
        chunks = await stream(bench, **fields, extra_body={"echo": True})
        assert "".join(chunk.text for chunk in chunks) == whole["text"]
        if logprobs is None:
            assert whole["logprobs"] is None
            return
        shown, ids = whole["logprobs"], tokenizer.encode(LONG, add_special_tokens=False).ids
        assert (shown["token_logprobs"][0], shown["top_logprobs"][0]) == (None, None)
        assert shown["token_logprobs"][1 : len(ids)] == [-0.25] * (len(ids) - 1)
        assert all(2 <= len(top) <= 3 for top in shown["top_logprobs"][1 : len(ids)])
        assert "".join(shown["tokens"]) == whole["text"]
        ends = [*shown["text_offset"][1:], len(whole["text"])]
        pieces = [whole["text"][start:end] for start, end in zip(shown["text_offset"], ends, strict=True)]
        assert pieces == shown["tokens"]
        streamed = joined([chunk.logprobs.model_dump() for chunk in chunks if chunk.logprobs is not None])
        assert streamed == shown

    play(model_folder, scene, script=script_of("hello, world", tokenizer, end=False))


def test_no_token_is_generated_for_max_tokens_0(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scene(bench: Bench) -> None:
        for ids in ([65, 66, 67], list(range(60, 120))):  # prefilled locally, and relayed
            answer = await post(bench, prompt=ids, max_tokens=0, echo=True, logprobs=0)
            choice = answer["choices"][0]
            assert choice["text"] == tokenizer.decode(ids)
            assert choice["finish_reason"] == "length"
            assert len(choice["logprobs"]["tokens"]) == len(ids)
            assert answer["usage"] == {**answer["usage"], "prompt_tokens": len(ids), "completion_tokens": 0}
        assert (await post(bench, prompt="a", max_tokens=0))["choices"][0]["text"] == ""
        assert [choice.text for choice in await stream(bench, prompt="a", max_tokens=0)] == [""]
        chat = await post(bench, "chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=0)
        assert chat["choices"][0]["message"]["content"] == ""

    play(model_folder, scene)


def test_prompt_logprobs_are_shown_for_every_position_and_choice(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scene(bench: Bench) -> None:
        ids = list(range(60, 120))
        answer = await post(bench, prompt=[ids, ids[:3]], prompt_logprobs=1, n=2)
        assert len(answer["choices"]) == 4
        for choice, prompt in zip(answer["choices"], [ids, ids, ids[:3], ids[:3]], strict=True):
            first, *others = choice["prompt_logprobs"]
            assert first is None
            assert len(others) == len(prompt) - 1
            for token, entry in zip(prompt[1:], others, strict=True):
                text = tokenizer.decode([token])
                assert entry[str(token)] == {"logprob": -0.25, "rank": 2, "decoded_token": text}
                assert entry[str(token + 1)]["rank"] == 1
        scored = [request.request.sampling.prompt_logprobs for request in bench.prefill.requests()]
        assert scored == [1], "one sample of a prompt has it computed"
        chat = await post(bench, "chat/completions", messages=[{"role": "user", "content": "a"}], prompt_logprobs=0)
        assert [each and len(each) for each in chat["prompt_logprobs"][:2]] == [None, 1]

    play(model_folder, scene)


def test_tokens_are_named_by_their_ids_if_wanted(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        fields: dict[str, Any] = {
            "prompt": [60, 61],
            "return_tokens_as_token_ids": True,
            "logprobs": 1,
            "max_tokens": 2,
        }
        shown = (await post(bench, **fields, echo=True))["choices"][0]["logprobs"]
        assert shown["tokens"] == ["token_id:60", "token_id:61", "token_id:65", "token_id:66"]
        assert shown["top_logprobs"][2] == {"token_id:66": -1.0, "token_id:65": -0.5}
        chat = await post(
            bench, "chat/completions", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=1,
            return_tokens_as_token_ids=True,
        )  # fmt: skip
        entry = chat["choices"][0]["logprobs"]["content"][0]
        assert (entry["token"], entry["bytes"]) == ("token_id:65", list(b"token_id:65"))
        assert entry["top_logprobs"][0]["token"] == "token_id:66"

    play(model_folder, scene)


def test_an_answer_without_text_has_token_ids(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        choice = (await post(bench, prompt=[60, 61], detokenize=False, echo=True))["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("", [65, 66, 67, 68])
        chunks = await stream(bench, prompt=[60, 61], extra_body={"detokenize": False})
        assert [token for chunk in chunks for token in chunk.token_ids or []] == [65, 66, 67, 68]

    play(model_folder, scene)


def test_the_stop_string_is_part_of_the_text_if_wanted(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scene(bench: Bench) -> None:
        stop: dict[str, Any] = {"prompt": LONG, "stop": ["XYZ", "o, w"], "max_tokens": 400}
        include = {"include_stop_str_in_output": True}
        choice = (await post(bench, **stop, **include))["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("hello, w", "o, w")
        chunks = await stream(bench, **stop, extra_body=include)
        assert "".join(chunk.text for chunk in chunks) == "hello, w"
        by_token = tokenizer.encode(",", add_special_tokens=False).ids
        choice = (await post(bench, prompt=LONG, max_tokens=400, stop_token_ids=by_token, **include))["choices"][0]
        assert choice["text"] == "hello,"

    play(model_folder, scene, script=script_of("hello, world", tokenizer, end=False), step_s=0.002)


def test_the_end_of_a_long_prompt_is_kept(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        ids = list(range(60, 160)) * 8
        last = await post(bench, prompt=ids, truncate_prompt_tokens=10, echo=True, return_token_ids=True)
        assert last["choices"][0]["prompt_token_ids"] == ids[-10:]
        assert last["usage"]["prompt_tokens"] == 10
        first = await post(bench, prompt=ids, truncate_prompt_tokens=10, truncation_side="right", return_token_ids=True)
        assert first["choices"][0]["prompt_token_ids"] == ids[:10]
        limit = await post(bench, prompt=ids, truncate_prompt_tokens=-1, max_tokens=12)
        assert limit["usage"]["prompt_tokens"] == 500
        assert limit["usage"]["completion_tokens"] == 12
        assert (await post(bench, prompt=ids[:5], truncate_prompt_tokens=10))["usage"]["prompt_tokens"] == 5
        text = await post(bench, prompt="fox " * 900, truncate_prompt_tokens=4, echo=True, max_tokens=0)
        assert "fox ".endswith(text["choices"][0]["text"][-4:])

    play(model_folder, scene)


def test_the_last_message_is_continued_and_echoed(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scene(bench: Bench) -> None:
        messages = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "once upon"}]
        fields: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
        answer = await post(bench, "chat/completions", messages=messages, **fields)
        asked = bench.prefill.requests()[0].token_ids
        assert tokenizer.decode(asked, skip_special_tokens=False).endswith("<|assistant|>once upon")
        assert answer["choices"][0]["message"]["content"].startswith("once upon")
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:
            refused = await client.post(
                "/v1/chat/completions", json={**FIELDS, "messages": messages, "continue_final_message": True}
            )
        assert refused.status_code == 400
        assert "add_generation_prompt" in refused.text

    play(model_folder, scene)


def test_masks_bad_words_and_whole_floats_reach_the_nodes(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scene(bench: Bench) -> None:
        answer = await post(
            bench, prompt=LONG, max_tokens=3.0, top_k=5.0, seed=7.0, allowed_token_ids=[70, 65], bad_words=["fox"],
            stop=list("0123456789"),
        )  # fmt: skip
        assert answer["usage"]["completion_tokens"] == 3
        for node in (bench.prefill, bench.decode):
            sampling = node.requests()[0].request.sampling
            assert (sampling.top_k, sampling.seed, sampling.allowed_token_ids.tolist()) == (5, 7, [70, 65])
            for ids in sampling.bad_words:
                assert tokenizer.decode(ids).strip() == "fox"
            assert sampling.bad_words

    play(model_folder, scene)


def test_a_misspelt_field_is_answered_with_a_warning_or_refused(model_folder: Path) -> None:
    body: dict[str, Any] = {**FIELDS, "prompt": "a", "temprature": 0, "user": "me", "metadata": {"a": "b"}}

    async def ask(bench: Bench, **fields: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:
            return await client.post("/v1/completions", json={**body, **fields})

    async def warned(bench: Bench) -> None:
        for stream in (False, True):
            answer = await ask(bench, stream=stream)
            assert (answer.status_code, answer.headers["x-kvrelay-ignored"]) == (200, "temprature")
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:
            assert "kvrelay_ignored_fields_total 2.0" in (await client.get("/metrics")).text

    async def refused(bench: Bench) -> None:
        answer = await ask(bench)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "temprature"
        assert "did you mean 'temperature'?" in answer.json()["error"]["message"]

    play(model_folder, warned)
    play(model_folder, refused, config={"strict_parameters": True})


_TURNS = [{"role": "user", "content": "a"}]
_OF_OTHER_APIS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "include": [], "max_tool_calls": 1, "service_tier": "auto"},
    "/v1/messages": {"messages": _TURNS, "max_tokens": 1, "metadata": {"user_id": "me"}, "container": None},
    "/v1/messages/count_tokens": {"messages": _TURNS, "context_management": {"edits": []}},
    "/api/chat": {"messages": _TURNS, "options": {"num_predict": 1, "num_ctx": 9}, "keep_alive": "5m"},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 1}, "keep_alive": -1, "shift": True},
    "/tokenize": {"prompt": "a", "add_special_tokens": False},
    "/detokenize": {"tokens": [65]},
}


def test_misspelt_fields_of_the_calls_of_other_apis_are_too(model_folder: Path) -> None:
    async def scene(bench: Bench, *, strict: bool) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:
            for path, body in [*_OF_OTHER_APIS.items(), ("/tokenize", {"messages": _TURNS})]:
                known = await client.post(path, json=body)
                assert (known.status_code, known.headers.get("x-kvrelay-ignored")) == (200, None), (path, known.text)
                misspelt = await client.post(path, json={**body, "temprature": 0})
                if strict:
                    assert (misspelt.status_code, "'temprature'" in misspelt.text) == (400, True), path
                else:
                    assert (misspelt.status_code, misspelt.headers["x-kvrelay-ignored"]) == (200, "temprature"), path

    play(model_folder, partial(scene, strict=False))
    play(model_folder, partial(scene, strict=True), config={"strict_parameters": True})


@pytest.mark.parametrize(("prompts", "n", "param"), [(3, 1, "prompt"), (3, 2, "prompt"), (1, 3, "n"), (2, 2, "n")])
def test_more_than_the_queue_takes_is_an_error_of_the_field_that_is_too_high(
    model_folder: Path, prompts: int, n: int, param: str
) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url, timeout=20) as client:
            body = {"prompt": ["a"] * prompts, "n": n, "max_tokens": 1}
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
            assert "at most 2 prompts" in refused.json()["error"]["message"]

    play(model_folder, scene, config={"max_waiting": 2})
