"""Failing attempts do not change the client's answer, at any token and any number of times; and how the router retries."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.router_bench import LONG, Bench, play, script_of
from support.stub_node import StubNode
from tokenizers import Tokenizer

import router.requests.placed_request
from common.control.messages import DecodeRequest
from router.nodes import breaker

ANSWER = "it goes on, and on, until the STOP that nobody sees"


async def collect(stream: Any) -> dict[str, Any]:
    """Everything in a stream that a client can see, except ids and times."""
    text, logprobs, finish, usage, ids = "", [], None, None, []
    async for chunk in stream:
        usage = chunk.usage.model_dump() if chunk.usage else usage
        for choice in chunk.choices:
            text += choice.text
            finish = (choice.finish_reason, choice.stop_reason) if choice.finish_reason else finish
            ids += getattr(choice, "token_ids", None) or []
            if choice.logprobs:
                logprobs += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
                logprobs += choice.logprobs.text_offset
    return {"text": text, "logprobs": logprobs, "finish": finish, "usage": usage, "ids": ids}


def ask(bench: Bench, **more: Any) -> Any:
    body: dict[str, Any] = {
        "model": "stub-model",
        "prompt": LONG,
        "max_tokens": 100,
        "seed": 5,
        "stop": ["STOP", "on, and zzz"],
        "logprobs": 2,
        "frequency_penalty": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        # A separate cache salt per request: no node holds the prompt, so that every first attempt is relayed.
        "extra_body": {"return_token_ids": True, "min_tokens": 3, "cache_salt": secrets.token_hex(4)},
        **more,
    }
    return bench.client.completions.create(**body)


@pytest.mark.parametrize("fault", ["leg", "prefill_too"])
def test_stream_broken_at_any_token_is_what_an_undisturbed_one_is(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, tokenizer: Tokenizer, fault: str
) -> None:
    monkeypatch.setattr(breaker, "FAILURES", 1000)

    async def scene(bench: Bench) -> None:
        other = StubNode("decode", "d1", str(model_folder), script=bench.decode.script, cached_tokens=99)
        bench.stack.list_nodes(bench.prefill, bench.decode, other)
        await bench.stack.usable(1, 2)
        expected = await collect(await ask(bench))
        assert expected["text"] == "it goes on, and on, until the "
        assert expected["finish"] == ("stop", "STOP")
        assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
        decodes = (bench.decode, other)
        for node in decodes:
            node.automatic = False
        total = expected["usage"]["completion_tokens"]
        for broken_after in range(1, total):
            await bench.stack.settled()
            for node in (bench.prefill, *decodes):
                node.received.clear()
            reader = asyncio.ensure_future(_collected(bench))
            first = await _whoever_runs(*decodes)
            await _first_token_is_out(bench)  # and with it the first attempt's prefix hits are known
            for _ in range(broken_after - 1):
                first.step()
            if fault == "prefill_too":  # the next attempt's prefill node fails it as well
                bench.prefill.fail_with = ("engine_error", "scripted")
            # Once its tokens are with the router: the link keeps order.
            first.fail(next(iter(first.running)), "engine_error")
            if fault == "prefill_too":
                await bench.prefill.until(lambda: len(bench.prefill.requests()) == 2)
                bench.prefill.fail_with = None
            while not reader.done():
                for node in decodes:
                    node.step()
                await asyncio.sleep(0)
            assert reader.result() == expected, broken_after
            again = max((r for node in decodes for r in node.requests()), key=lambda request: request.key.attempt)
            assert again.key.attempt >= 2
            assert again.generated_ids.tolist() == expected["ids"][: len(again.generated_ids)]
            asked = again.request.sampling
            assert (asked.seed, asked.frequency_penalty, asked.min_tokens) == (5, 0.5, 3)

    # Not kv_aware, which learns from scripted nodes sooner or later that a relay is not worth it. The lease is longer than
    # any pause of a busy machine: the prefix hits of an attempt that is lost before its first token are unknown.
    config = {"policy": "least_load", "lease_s": 10.0}
    play(model_folder, scene, config=config, script=script_of(ANSWER, tokenizer), cached_tokens=7)


def test_stream_goes_on_where_its_tokens_mean_the_same(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, tokenizer: Tokenizer
) -> None:
    """Other weights under the same model name, as during a rolling update, would continue the answer differently."""
    monkeypatch.setattr(breaker, "FAILURES", 1000)

    async def scene(bench: Bench) -> None:
        others = [
            StubNode("decode", f"d{n}", str(model_folder), script=bench.decode.script, fingerprint=fingerprint)
            for n, fingerprint in ((1, "new"), (2, "stub"), (3, "new"))
        ]
        decodes = [bench.decode, *others]
        bench.stack.list_nodes(bench.prefill, *decodes)
        await bench.stack.usable(1, 4)
        for node in decodes:
            node.automatic = False
        for _ in range(4):
            await bench.stack.settled()
            reader = asyncio.ensure_future(_collected(bench))
            first = await _whoever_runs(*decodes)
            first.step()
            await _first_token_is_out(bench)
            first.fail(next(iter(first.running)), "engine_error")
            second = await _whoever_runs(*decodes)
            assert second is not first
            assert second.fingerprint == first.fingerprint
            while not reader.done():
                second.step()
                await asyncio.sleep(0)
            assert reader.result()["text"] == "it goes on, and on, until the "

    config = {"policy": "round_robin", "allow_mixed_weights": True}
    play(model_folder, scene, config=config, script=script_of(ANSWER, tokenizer))


async def _collected(bench: Bench) -> dict[str, Any]:
    return await collect(await ask(bench))


async def _whoever_runs(*nodes: StubNode) -> StubNode:
    async with asyncio.timeout(20):
        while True:
            for node in nodes:
                if node.running:
                    return node
            await asyncio.sleep(0.001)


async def _first_token_is_out(bench: Bench) -> None:
    stories = bench.stack.router.dispatcher.stories
    async with asyncio.timeout(20):
        while True:
            story = stories.get(stories.recent(1)[0]["request_id"])
            if story is not None and any(event["event"] == "first_token" for event in story["events"]):
                return
            await asyncio.sleep(0.001)


def test_long_stream_outlives_more_faults_than_max_attempts(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.decode.automatic = False
        stream = await bench.client.completions.create(model="stub-model", prompt=LONG, max_tokens=30, stream=True)
        reader = asyncio.ensure_future(_ids(stream))
        for fault in range(10):  # each attempt brings a token of the decode node before it fails
            await bench.decode.until(lambda: len(bench.decode.requests()) == fault + 1)  # noqa: B023
            await bench.decode.until(lambda: bool(bench.decode.running))
            bench.decode.step()
            bench.decode.fail(next(iter(bench.decode.running)), "engine_error")
        await bench.decode.until(lambda: len(bench.decode.requests()) == 11)
        while not reader.done():
            bench.decode.step()
            await asyncio.sleep(0)
        text, told = reader.result()
        assert len(text) == 30
        assert told["attempt"] == 11

    play(model_folder, scene, config={"max_attempts": 2, "policy": "least_load"})


async def _ids(stream: Any) -> tuple[str, dict[str, Any]]:
    text, told = "", {}
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        told = getattr(chunk, "kvrelay", None) or told
    return text, told


def test_first_retry_goes_at_once_to_another_node_and_waits_where_there_is_none(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        stories = bench.stack.router.dispatcher.stories
        bench.decode.fail_with = ("engine_error", "scripted")
        with pytest.raises(openai.InternalServerError, match="after 3 attempts"):
            await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=2)
        alone = stories.get(stories.recent(1)[0]["request_id"])
        assert alone is not None
        pauses = [event["data"]["seconds"] for event in alone["events"] if event["event"] == "backoff"]
        assert len(pauses) == 2, "the only node is used again, after a pause each time"
        assert 0.05 <= pauses[0] <= 0.1 <= pauses[1] <= 0.2

        other = StubNode("decode", "d1", str(model_folder))
        bench.stack.list_nodes(bench.prefill, bench.decode, other)
        await bench.stack.usable(1, 2)
        for _ in range(4):
            await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=2)
            told = stories.get(stories.recent(1)[0]["request_id"])
            assert told is not None
            assert "backoff" not in [event["event"] for event in told["events"]]

    play(model_folder, scene, config={"policy": "round_robin"})


def test_node_that_fails_every_request_gets_no_more_while_there_is_another(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        other = StubNode("decode", "d1", str(model_folder))
        bench.stack.list_nodes(bench.prefill, bench.decode, other)
        await bench.stack.usable(1, 2)
        bench.decode.fail_with = ("engine_error", "scripted")
        breakers = bench.stack.router.dispatcher.breakers
        async with asyncio.timeout(20):
            while breakers.view(bench.decode.incarnation).state != "open":
                await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1)
        asked = len(bench.decode.requests())
        for _ in range(6):
            await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1)
        assert len(bench.decode.requests()) == asked
        async with httpx.AsyncClient(base_url=bench.stack.url) as http:
            metrics = (await http.get("/metrics")).text
        assert 'kvrelay_node_breaker{model_name="stub-model",node="d0",role="decode"} 2.0' in metrics
        assert "kvrelay_breakers_opened_total 1.0" in metrics
        # With no other node left it is used again, and serves if it can.
        bench.decode.fail_with = None
        bench.stack.list_nodes(bench.prefill, bench.decode)
        await other.close()
        await bench.stack.usable(1, 1)
        answer = await bench.client.completions.create(model="stub-model", prompt="hi", max_tokens=1)
        assert answer.choices[0].finish_reason == "length"

    play(model_folder, scene, config={"policy": "round_robin"})


def test_waiting_stream_ends_with_503_if_no_node_comes_back(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.requests.placed_request, "REPLACEMENT_WAIT_S", 0.3)

    async def scene(bench: Bench) -> None:
        call = await bench.held(max_tokens=4, timeout=20)
        await bench.decode.close()
        bench.decode.running.clear()
        with pytest.raises(openai.InternalServerError) as gone:
            await call
        assert gone.value.status_code == 503
        story = bench.stack.router.dispatcher.stories.recent(1)[0]
        assert story["outcome"] == "failed"

    play(model_folder, scene, config={"local_prefill_tokens": 32})


def test_client_that_leaves_while_its_request_waits_for_a_node_leaves_nothing(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        call = await bench.held(max_tokens=4, timeout=20)
        await bench.decode.close()
        bench.decode.running.clear()
        await bench.stack.usable(1, 0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await bench.stack.settled()
        reborn = StubNode("decode", "d0", str(model_folder))
        bench.stack.list_nodes(bench.prefill, reborn)
        await bench.stack.usable(1, 1)
        assert not [message for message in reborn.received if isinstance(message, DecodeRequest)]

    play(model_folder, scene, config={"local_prefill_tokens": 32})
