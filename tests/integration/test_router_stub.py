"""The router over real sockets with scripted nodes, seen through the official client."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.router_bench import LONG, Bench, play, script_of
from support.stub_node import MAX_LEN, StubNode, running_stack
from tokenizers import Tokenizer

import router.http.server
from common.config.service_configs import RouterConfig
from common.control.links import Link


def test_relayed_chat_answers_whole_and_streamed_alike(model_folder: Path, tokenizer: Tokenizer) -> None:
    answer = "héllo 🎉 wörld, the end"

    async def scene(bench: Bench) -> None:
        messages: Any = [{"role": "user", "content": LONG}]
        raw = await bench.client.chat.completions.with_raw_response.create(model="stub-model", messages=messages)
        whole = raw.parse()
        assert whole.choices[0].message.content == answer
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert raw.headers["x-kvrelay-prefill-mode"] == "relayed"
        assert (raw.headers["x-kvrelay-prefill-node"], raw.headers["x-kvrelay-decode-node"]) == ("p0", "d0")
        assert list(json.loads(raw.headers["x-kvrelay-decision"])["decode"]["scores"]) == ["d0"]

        text, roles, finish, usage = "", [], None, None
        stream = await bench.client.chat.completions.create(
            model="stub-model", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                roles.append(choice.delta.role)
                finish = choice.finish_reason or finish
        assert (text, finish) == (answer, "stop")
        assert roles[0] == "assistant"
        assert not any(roles[1:])
        assert usage == whole.usage

        prompt = f"<s><|user|>{LONG}</s><|assistant|>"
        asked = bench.prefill.requests()[0]
        assert asked.token_ids.tolist() == tokenizer.encode(prompt, add_special_tokens=False).ids
        assert usage.prompt_tokens == len(asked.token_ids)
        assert usage.completion_tokens == len(tokenizer.encode(answer).ids) + 1
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 7
        assert asked.request.sampling.stop_token_ids == [tokenizer.token_to_id("</s>")]

    play(model_folder, scene, script=script_of(answer, tokenizer), cached_tokens=7)


@pytest.mark.parametrize("generation_config", ["auto", "none"])
def test_the_models_sampling_defaults_reach_the_nodes(
    model_folder: Path, tmp_path: Path, generation_config: Any
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20, "max_new_tokens": 4}')

    async def scene(bench: Bench) -> None:
        whole = await bench.client.chat.completions.create(
            model="stub-model", messages=[{"role": "user", "content": LONG}], top_p=0.5
        )
        want = (0.7, 20, 0.5) if generation_config == "auto" else (1.0, 0, 0.5)
        for node in (bench.prefill, bench.decode):
            sampling = node.requests()[0].request.sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p) == want
        assert whole.usage is not None
        assert (whole.usage.completion_tokens == 4) == (generation_config == "auto")

    play(folder, scene, config={"generation_config": generation_config})


def test_short_prompt_is_prefilled_by_the_decode_node_and_says_so(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        raw = await bench.client.completions.with_raw_response.create(model="stub-model", prompt="hi", max_tokens=3)
        assert raw.headers["x-kvrelay-prefill-mode"] == "local"
        assert "x-kvrelay-prefill-node" not in raw.headers
        assert raw.parse().usage.completion_tokens == 3  # type: ignore[union-attr]
        assert bench.prefill.requests() == []

    play(model_folder, scene)


def test_request_that_ends_with_its_first_token_needs_no_decode_node_step(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        answer = await bench.client.completions.create(model="stub-model", prompt=LONG, max_tokens=1)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1

    play(model_folder, scene)


def test_stop_string_over_token_boundaries_cuts_the_text_and_aborts_the_attempt(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async def scene(bench: Bench) -> None:
        stream = await bench.client.completions.create(
            model="stub-model", prompt=LONG, max_tokens=400, stop=["XYZ", "o, wor"], stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "hell"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == "o, wor"  # type: ignore[attr-defined]
        await bench.decode.until(lambda: len(bench.decode.aborts()) == 1)

    # Without an end the node would go on to max_tokens: only the abort stops it.
    play(model_folder, scene, script=script_of("hello, world", tokenizer, end=False), step_s=0.002)


def test_token_ids_are_returned_whole_and_streamed(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        ids = list(range(60, 100))
        body: Any = {"model": "stub-model", "prompt": ids, "max_tokens": 4}
        extra = {"return_token_ids": True}
        whole = await bench.client.completions.create(**body, extra_body=extra)
        assert whole.choices[0].token_ids == [65, 66, 67, 68]  # type: ignore[attr-defined]
        assert whole.prompt_token_ids == ids  # type: ignore[attr-defined]
        stream = await bench.client.completions.create(**body, extra_body=extra, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks[0].prompt_token_ids == ids  # type: ignore[attr-defined]
        streamed = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
        assert streamed == [65, 66, 67, 68]

    play(model_folder, scene)


def test_several_prompts_become_several_choices_in_order(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        answer = await bench.client.completions.create(model="stub-model", prompt=[LONG, "b", "c"], max_tokens=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        stream = await bench.client.completions.create(
            model="stub-model", prompt=[LONG, "b", "c"], max_tokens=2, stream=True
        )
        finished = [choice.index async for chunk in stream for choice in chunk.choices if choice.finish_reason]
        assert sorted(finished) == [0, 1, 2]

    play(model_folder, scene)


def test_logprobs_of_both_calls_have_openais_shape(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        chat = await bench.client.chat.completions.create(
            model="stub-model", messages=messages, max_completion_tokens=3, logprobs=True, top_logprobs=2
        )
        entries = chat.choices[0].logprobs.content  # type: ignore[union-attr]
        assert entries is not None
        assert len(entries) == 3
        assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]
        assert (
            bytes(byte for entry in entries for byte in entry.bytes or []).decode() == chat.choices[0].message.content
        )
        stream = await bench.client.completions.create(
            model="stub-model", prompt="hi", max_tokens=4, logprobs=1, stream=True
        )
        text, offsets = "", []
        async for chunk in stream:
            choice = chunk.choices[0]
            text += choice.text
            if choice.logprobs:
                offsets += choice.logprobs.text_offset or []
                assert choice.logprobs.token_logprobs == [-0.5]
        assert offsets == [0, 1, 2, 3]
        assert len(text) == 4

    play(model_folder, scene)


@pytest.mark.parametrize("skip", [True, False])
def test_text_offsets_are_places_in_the_text(model_folder: Path, tokenizer: Tokenizer, skip: bool) -> None:
    """Characters of several tokens, and special tokens without text, do not shift the offsets of later tokens."""
    ids = [*tokenizer.encode("é🎉x</s>y").ids, tokenizer.token_to_id("</s>")]

    async def scene(bench: Bench) -> None:
        body: Any = {"model": "stub-model", "prompt": "hi", "max_tokens": len(ids), "logprobs": 0}
        extra = {"ignore_eos": True, "skip_special_tokens": skip}
        whole = (await bench.client.completions.create(**body, extra_body=extra)).choices[0]
        assert whole.text == ("é🎉xy" if skip else "é🎉x</s>y</s>")
        assert whole.logprobs is not None
        assert whole.logprobs.text_offset == [0, 0, 1, 1, 1, 1, 2, *([3, 3, 4] if skip else [3, 7, 8])]
        streamed: list[int] = []
        async for chunk in await bench.client.completions.create(**body, extra_body=extra, stream=True):
            streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.text_offset) or []
        assert streamed == whole.logprobs.text_offset

    play(model_folder, scene, script=lambda index: ids[index])


def test_continuous_usage_counts_up(model_folder: Path) -> None:
    """Every chunk counts the tokens up to it, also if many tokens arrived together."""

    async def scene(bench: Bench) -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        bench.decode.automatic = False
        bench.decode.gate.clear()
        call = bench.client.chat.completions.create(
            model="stub-model",
            messages=[{"role": "user", "content": LONG}],
            max_tokens=5,
            stream=True,
            stream_options=options,
            extra_body={"return_token_ids": True},
        )
        reader = asyncio.ensure_future(_chunks(call))
        await bench.decode.until(lambda: bool(bench.decode.running))
        for _ in range(4):
            bench.decode.step()
        told, counts = 0, list[int]()
        for chunk in await reader:
            told += sum(len(getattr(choice, "token_ids", None) or []) for choice in chunk.choices)
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens == told
            counts.append(told)
        assert counts == [0, 1, 2, 3, 4, 5, 5]

    play(model_folder, scene)


async def _chunks(call: Any) -> list[Any]:
    return [chunk async for chunk in await call]


@pytest.mark.parametrize("streamed", [True, False])
def test_client_that_disconnects_aborts_both_legs(model_folder: Path, streamed: bool) -> None:
    async def scene(bench: Bench) -> None:
        bench.prefill.gate.clear()  # the first token never comes, the second leg is already open
        bench.decode.gate.clear()
        call = bench.client.completions.create(model="stub-model", prompt=LONG, max_tokens=50, stream=streamed)
        task = asyncio.ensure_future(call)
        await bench.prefill.until(lambda: len(bench.prefill.requests()) == 1)
        await bench.decode.until(lambda: len(bench.decode.requests()) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bench.prefill.until(lambda: len(bench.prefill.aborts()) == 1)
        await bench.decode.until(lambda: len(bench.decode.aborts()) == 1)

    play(model_folder, scene)


def test_client_that_leaves_a_running_stream_aborts_it(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        stream = await bench.client.completions.create(model="stub-model", prompt=LONG, max_tokens=400, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await bench.decode.until(lambda: len(bench.decode.aborts()) == 1)

    play(model_folder, scene, step_s=0.005)


@pytest.mark.parametrize("draining", [False, True])
def test_stream_goes_on_token_exact_when_the_decode_node_dies(
    model_folder: Path, tokenizer: Tokenizer, *, draining: bool
) -> None:
    """Also if the only other node drains: it gets no new requests, but this request is not new."""
    answer = "the stream goes on as if nothing had happened at all"

    async def scene(bench: Bench) -> None:
        other = StubNode("decode", "d1", str(model_folder), script=script_of(answer, tokenizer), draining=draining)
        bench.decode.automatic = False
        bench.decode.gate.clear()
        stream = await bench.client.completions.create(
            model="stub-model", prompt=LONG, max_tokens=100, seed=5, stream=True, stream_options={"include_usage": True}
        )
        reader = asyncio.ensure_future(_text_of(stream))
        await bench.decode.until(lambda: bool(bench.decode.running))
        for _ in range(5):
            bench.decode.step()
        bench.stack.list_nodes(bench.prefill, bench.decode, other)
        await bench.stack.usable(1, 1 if draining else 2)
        while draining and not bench.stack.router.dispatcher.nodes.fleets("stub-model").finishing.nodes:
            await asyncio.sleep(0.002)
        await bench.decode.close()
        text, usage = await reader
        assert text == answer
        assert usage.completion_tokens == len(tokenizer.encode(answer).ids) + 1
        again = other.requests()[0]
        assert again.key.attempt == 2
        assert again.request.sampling.seed == 5
        assert len(again.request.prompt_ids) == usage.prompt_tokens
        assert again.generated_ids.tolist() == tokenizer.encode(answer).ids[:6]
        bench.decode.running.clear()

    # The lease is longer than any pause of a busy machine: the link breaks at once.
    play(model_folder, scene, config={"lease_s": 10.0}, script=script_of(answer, tokenizer))


def test_samples_follow_the_first_one_to_a_decode_node_that_drains_if_no_other_is_left(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        asked = await bench.held(max_tokens=4, n=3)
        bench.decode.draining = True
        while not bench.stack.router.dispatcher.nodes.fleets("stub-model").finishing.nodes:
            await asyncio.sleep(0.002)
        bench.decode.gate.set()
        async with asyncio.timeout(10):
            answer = await asked
        assert [len(choice.text) for choice in answer.choices] == [4] * 3
        assert [request.prefill is None for request in bench.decode.requests()] == [False, True, True], "one relay"
        with pytest.raises(openai.InternalServerError, match="draining"):
            await bench.client.completions.create(model="stub-model", prompt=LONG)

    play(model_folder, scene)


async def _text_of(stream: Any) -> tuple[str, Any]:
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.text for choice in chunk.choices)
    return text, usage


@pytest.mark.parametrize("draining", [False, True])
def test_stream_waits_for_the_only_decode_node_to_come_back(model_folder: Path, *, draining: bool) -> None:
    async def scene(bench: Bench) -> None:
        bench.decode.gate.clear()
        stream = await bench.client.completions.create(model="stub-model", prompt=LONG, max_tokens=4, stream=True)
        reader = asyncio.ensure_future(_text_of(stream))
        await bench.decode.until(lambda: bool(bench.decode.running))
        await bench.decode.close()
        bench.decode.running.clear()
        await bench.stack.usable(1, 0)
        reborn = StubNode("decode", "d0", str(model_folder), draining=draining)
        bench.stack.list_nodes(bench.prefill, reborn)
        text, _ = await reader
        assert len(text) == 4
        assert reborn.requests()[0].key.attempt == 2

    play(model_folder, scene)


def test_prefill_node_that_keeps_failing_is_replaced_by_a_local_prefill_in_the_last_attempt(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        raw = await bench.client.completions.with_raw_response.create(model="stub-model", prompt=LONG, max_tokens=3)
        assert raw.headers["x-kvrelay-attempt"] == "3"
        assert raw.headers["x-kvrelay-prefill-mode"] == "local"
        assert [request.key.attempt for request in bench.decode.requests()] == [1, 2, 3]
        assert bench.decode.aborts()[0].attempt == 1

    async def failing(bench: Bench) -> None:
        bench.prefill.fail_with = ("engine_error", "scripted")
        await scene(bench)

    play(model_folder, failing)


def test_error_after_the_last_attempt_reaches_the_client_before_and_in_a_stream(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.decode.fail_with = ("engine_error", "scripted")
        bench.decode.gate.clear()
        with pytest.raises(openai.InternalServerError, match=r"scripted \(after 2 attempts\)"):
            await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=3)
        bench.decode.fail_with = None
        stream = await bench.client.completions.create(model="stub-model", prompt=LONG, max_tokens=9, stream=True)
        reader = asyncio.ensure_future(_text_of(stream))
        await bench.decode.until(lambda: bool(bench.decode.running))
        bench.decode.fail(next(iter(bench.decode.running)), "invalid_request", "cannot ever fit")
        with pytest.raises(openai.APIError, match="cannot ever fit"):
            await reader

    play(model_folder, scene, config={"max_attempts": 2})


def test_silent_node_is_lost_after_its_lease_and_no_longer_used(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        call = await bench.held(max_tokens=3, timeout=20)
        bench.decode.pings_answered = False
        other = StubNode("decode", "d1", str(model_folder))
        bench.stack.list_nodes(bench.prefill, bench.decode, other)
        assert len((await call).choices[0].text) == 3
        assert other.requests()[0].key.attempt == 2
        # Its link is renewed, and what it still runs for us is aborted there.
        await bench.decode.until(lambda: len(bench.decode.aborts()) == 1)

    play(model_folder, scene, config={"lease_s": 0.6})


def test_no_nodes_is_503_and_health_says_so(model_folder: Path) -> None:
    async def main() -> None:
        config = RouterConfig(model=str(model_folder), lease_s=1.0)
        async with running_stack(config) as stack, httpx.AsyncClient(base_url=stack.url) as http:
            assert (await http.get("/health")).status_code == 503
            answer = await http.post("/v1/completions", json={"model": "stub-model", "prompt": "hi"})
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
            decode = StubNode("decode", "d0", str(model_folder))
            stack.list_nodes(decode)
            await stack.usable(0, 1)
            health = await http.get("/health")
            assert health.status_code == 200
            assert (health.json()["prefill"], health.json()["decode"]) == (0, 1)
            assert "local" in health.json()["prefill_mode"]
            answer = await http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 2})
            assert answer.headers["x-kvrelay-prefill-mode"] == "local"

    asyncio.run(asyncio.wait_for(main(), 30))


def test_queue_bound_gives_429_with_retry_after_and_recovers(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.decode.gate.clear()
        calls = [
            asyncio.ensure_future(bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1))
            for _ in range(2)
        ]
        await bench.decode.until(lambda: len(bench.decode.running) == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1)
        assert refused.value.response.headers["retry-after"] == "1"
        bench.decode.gate.set()
        await asyncio.gather(*calls)
        await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1)

    play(model_folder, scene, config={"max_waiting": 2})


def test_request_past_its_deadline_is_504_and_aborted(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.decode.gate.clear()
        with pytest.raises(openai.InternalServerError) as late:
            await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1)
        assert late.value.status_code == 504
        await bench.decode.until(lambda: len(bench.decode.aborts()) == 1)

    play(model_folder, scene, config={"request_timeout_s": 0.2})


def test_penalties_and_biases_reach_both_nodes(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        await bench.client.completions.create(
            model="stub-model",
            prompt=LONG,
            max_tokens=2,
            presence_penalty=0.5,
            frequency_penalty=-1,
            logit_bias={"7": -100, "8": 2},
            extra_body={"repetition_penalty": 1.25},
        )
        for node in (bench.prefill, bench.decode):
            sampling = node.requests()[0].request.sampling
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
            assert (sampling.repetition_penalty, sampling.logit_bias) == (1.25, [(7, -100.0), (8, 2.0)])

    play(model_folder, scene)


def test_seed_of_any_size_is_folded_into_64_bits(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        for seed in (2**100 + 5, -2, 5):
            await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1, seed=seed)
        assert [request.request.sampling.seed for request in bench.decode.requests()] == [5, 2**64 - 2, 5]

    play(model_folder, scene)


def test_request_that_cannot_be_sent_gives_its_seats_back(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(bench: Bench) -> None:
        def refuse(self: Link, message: object) -> None:
            raise TypeError("cannot be encoded")

        with monkeypatch.context() as patch:
            patch.setattr(Link, "send", refuse)
            with pytest.raises(openai.InternalServerError):
                await bench.client.completions.create(model="stub-model", prompt=["hi", "ho"], max_tokens=1)
        assert (bench.stack.router.dispatcher.running, bench.stack.router.dispatcher.waiting) == (0, 0)
        await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1)

    play(model_folder, scene)


def test_bug_on_the_last_chunk_is_an_error_and_no_endless_wait(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(bench: Bench) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(bench.stack.router.dispatcher.state("stub-model").metrics, "leg", fail)
            with pytest.raises(openai.InternalServerError, match="internal error"):
                await asyncio.wait_for(
                    bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1), timeout=5
                )

    play(model_folder, scene)


def test_body_that_does_not_arrive_is_408_in_openais_shape(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.http.server, "BODY_TIMEOUT_S", 0.2)

    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        answer = await asyncio.wait_for(reader.read(), timeout=5)  # to the end: the connection is closed
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"

    play(model_folder, scene)


def test_metrics_account_for_what_happened(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        await bench.client.completions.create(model="stub-model", prompt=LONG, max_tokens=5)
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            text = (await http.get("/metrics")).text
        for line in (
            'vllm:request_success_total{finished_reason="length",model_name="stub-model"} 1.0',
            'vllm:generation_tokens_total{model_name="stub-model"} 5.0',
            'vllm:time_to_first_token_seconds_count{model_name="stub-model"} 1.0',
            'vllm:inter_token_latency_seconds_count{model_name="stub-model"} 4.0',
            'kvrelay_attempts_total{mode="relayed"} 1.0',
            "kvrelay_relayed_bytes_total 4096.0",
            'kvrelay_node_usable{model_name="stub-model",node="d0",role="decode"} 1.0',
        ):
            assert line in text, line

    play(model_folder, scene)


BAD_REQUESTS: list[tuple[str, Any, int, str | None, str]] = [
    ("completions", {"prompt": ""}, 400, "prompt", "empty"),
    ("completions", {"prompt": []}, 400, "prompt", "empty"),
    ("completions", {"prompt": [[]]}, 400, "prompt", "empty"),
    ("completions", {}, 400, "prompt", "required"),
    ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "greater"),
    ("completions", {"prompt": "a", "max_tokens": "7"}, 400, "max_tokens", "integer"),
    ("completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens", "integer"),
    ("completions", {"prompt": "a", "model": "other"}, 404, "model", "other"),
    ("completions", {"prompt": "a " * MAX_LEN}, 400, "prompt", "maximum context length is 512 tokens"),
    ("completions", {"prompt": "fox " * 900_000}, 400, "prompt", "maximum context length is 512 tokens"),
    ("completions", {"prompt": "a", "max_tokens": MAX_LEN}, 400, "prompt", "maximum context length"),
    ("completions", {"prompt": [5, 100_000]}, 400, "prompt", "below 400"),
    ("completions", {"prompt": [5, -1]}, 400, "prompt", "at least 0"),
    ("completions", {"prompt": "a", "stop": ["a"] * 65}, 400, "stop", "at most 64"),
    ("completions", {"prompt": "a", "stop": "x" * 5000}, 400, "stop", "characters"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "stop", "characters"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs", "20"),
    ("completions", {"prompt": "a", "min_tokens": 20}, 400, "min_tokens", "more than"),
    ("completions", {"prompt": "a", "top_k": 2**64}, 400, "top_k", "less than"),
    ("completions", {"prompt": "a", "min_tokens": 2**64}, 400, "min_tokens", "less than"),
    ("completions", {"prompt": "a", "max_tokens": 2**64}, 400, "max_tokens", "less than"),
    ("completions", {"prompt": "a", "stop_token_ids": [2**64]}, 400, "stop_token_ids", "less than"),
    ("completions", {"prompt": "a", "stop_token_ids": ["x"] * 129}, 400, "stop_token_ids", "at most 128"),
    ("completions", {"prompt": [2**64]}, 400, "prompt", "below 400"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n", "1"),
    ("completions", {"prompt": "a", "n": 129}, 400, "n", "128"),
    ("completions", {"prompt": "a", "n": True}, 400, "n", "integer"),
    ("completions", {"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of", "less than n"),
    ("completions", {"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of", "best_of"),
    ("completions", {"prompt": "a", "vllm_xargs": {"a": 1}}, 400, "vllm_xargs", "not supported"),
    ("completions", {"prompt": "a", "max_tokens": 16.5}, 400, "max_tokens", "integer"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "fill-in-the-middle"),
    ("completions", {"prompt": [5], "suffix": "b"}, 400, "suffix", "suffix"),
    ("completions", {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids", "at least 1"),
    ("completions", {"prompt": "a", "allowed_token_ids": [400]}, 400, "allowed_token_ids", "below 400"),
    ("completions", {"prompt": "a", "allowed_token_ids": [-1]}, 400, "allowed_token_ids", "at least 0"),
    ("completions", {"prompt": "a", "bad_words": ["x"] * 129}, 400, "bad_words", "at most 128"),
    ("completions", {"prompt": "a", "bad_words": [""]}, 400, "bad_words", "at least 1"),
    ("completions", {"prompt": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "-1"),
    ("completions", {"prompt": "a", "prompt_logprobs": 21}, 400, "prompt_logprobs", "20"),
    ("completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "prompt_logprobs"),
    ("completions", {"prompt": "a", "detokenize": False, "stop": "x"}, 400, "stop", "detokenize"),
    ("completions", {"prompt": "a", "presence_penalty": 2.5}, 400, "presence_penalty", "2"),
    ("completions", {"prompt": "a", "frequency_penalty": -3}, 400, "frequency_penalty", "-2"),
    ("completions", {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "0.01"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "token ids"),
    ("completions", {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias", "100"),
    ("completions", {"prompt": "a", "logit_bias": {"400": 1}}, 400, "logit_bias", "below 400"),
    ("completions", {"prompt": "a", "logit_bias": [1]}, 400, "logit_bias", "dict"),
    ("completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "at most"),
    ("completions", {"prompt": "a", "request_id": "x" * 257}, 400, "request_id", "256"),
    ("completions", {"prompt": "a", "kv_transfer_params": {"host": "x"}}, 400, "kv_transfer_params", "not supported"),
    ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature", "2"),
    ("completions", {"prompt": "a", "top_p": -0.1}, 400, "top_p", "0"),
    ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
    ("completions", {"prompt": ["a"] * 65}, 400, "prompt", "64"),
    ("chat/completions", {"messages": []}, 400, "messages", "at least 1"),
    ("chat/completions", {"messages": [1] * 4097}, 400, "messages", "at most 4096"),
    ("chat/completions", {"messages": [{"role": "user", "content": [1] * 4097}]}, 400, "messages", "at most 4096"),
    ("chat/completions", {"messages": [{"role": "a pope", "content": "a"}]}, 400, "messages", "role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
        "image",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
        400,
        "tools",
        "type",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3},
        400,
        "top_logprobs",
        "logprobs",
    ),
]


def test_bad_requests_are_refused_in_openais_shape_and_touch_no_node(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url + "/v1/") as http:
            for path, body, status, param, words in BAD_REQUESTS:
                answer = await http.post(path, json=body)
                shown = (body, answer.text)
                error = answer.json()["error"]
                assert answer.status_code == status, shown
                assert error.keys() == {"message", "type", "param", "code"}, shown
                assert error["param"] == param, shown
                assert words in error["message"], shown
                assert len(answer.content) < 1000, shown
            json_type = {"content-type": "application/json"}
            for content, headers, status in (
                (b'{"prompt": "a"', json_type, 400),
                (b"\xff\xfe", json_type, 400),
                (b'{"prompt": "a", "temperature": NaN}', json_type, 400),
                (b"[" * 100_000, json_type, 400),
                (b"[1]", json_type, 400),
                (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415),
                (b'{"prompt": "a"}', {}, 415),
                (gzip.compress(b'{"prompt": "a"}'), {**json_type, "content-encoding": "gzip"}, 415),
                (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', json_type, 413),
            ):
                answer = await http.post("completions", content=content, headers=headers)
                assert answer.status_code == status, (content[:50], answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert len(answer.content) < 1000
            assert (await http.get("nothing/here")).json()["error"]["code"] == "not_found"
            wrong = await http.get("completions")
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
            await bench.client.completions.create(model="stub-model", prompt="still fine", max_tokens=1)
        assert len(bench.decode.requests()) == 1

    play(model_folder, scene)


async def _chunked(size: int) -> Any:
    for _ in range(size // 65536):
        yield b"a" * 65536


def test_body_without_a_declared_length_is_bounded_too(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url + "/v1/") as http:
            headers = {"content-type": "application/json"}
            answer = await http.post("completions", content=_chunked(6_000_000), headers=headers)
        assert answer.status_code == 413

    play(model_folder, scene)


def test_with_keys_everything_but_health_wants_one(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/version", "/nothing"):
                refused = await http.get(path)
                assert refused.status_code == 401, path
                assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await http.get("/v1/models", headers={"authorization": "Bearer key-on"})).status_code == 401
            assert (await http.get("/v1/models", headers={"authorization": b"Bearer k\xe9y"})).status_code == 401
            assert (await http.get("/health")).status_code == 200
        models = await bench.client.models.list()
        assert [model.id for model in models.data] == ["stub-model"]
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            assert (await http.post("/v1/completions")).status_code == 401
            assert (await http.get("/version", headers={"authorization": "Bearer ключ".encode()})).status_code == 200
            text = (await http.get("/metrics", headers={"authorization": "Bearer key-one"})).text
        assert 'kvrelay_http_errors_total{status="401"} 9.0' in text

    play(model_folder, scene, config={"api_key": "key-one, key-two, ключ"}, api_key="key-two")


def test_operator_pages_answer(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            for path in ("/docs", "/openapi.json", "/version", "/ping", "/metrics", "/v1/models/stub-model"):
                assert (await http.get(path)).status_code == 200, path
            schema = (await http.get("/openapi.json")).json()
            assert "requestBody" in schema["paths"]["/v1/chat/completions"]["post"]

    play(model_folder, scene)
