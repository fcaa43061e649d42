"""kill -9 of nodes and of Redis while streams run: the router keeps answering, nodes come back, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.draft_heads import always_right, make_mtp, small_vocabulary
from support.oracle import greedy, make_tiny
from support.steady import SteadyTime
from support.system import System, running_system, wait_until

MODEL = "qwen2"
STREAMS = 8
NEW_TOKENS = 300


@dataclass
class Stream:
    """What one client saw."""

    tokens: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    finish_reason: str | None = None
    done: bool = False


async def read_stream(
    client: httpx.AsyncClient, prompt: list[int], stream: Stream, started: asyncio.Event, **options: Any
) -> None:
    """Follow one stream to its end, however it ends. Greedy, unless `options` of the request say something else."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **options,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            stream.error = json.loads(await answer.aread())["error"]
            started.set()
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                stream.done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                stream.error = event["error"]
                continue
            for choice in event["choices"]:
                stream.tokens += choice.get("token_ids") or []
                stream.finish_reason = choice["finish_reason"] or stream.finish_reason
            if len(stream.tokens) >= 20:
                started.set()
    started.set()


def prompts(num_ids: int = 290) -> list[list[int]]:
    return [[3 + (7 * n + i) % num_ids for i in range(40 + 20 * n)] for n in range(STREAMS)]


async def stream_through(system: System, role: str, num_ids: int = 290, **options: Any) -> list[Stream]:
    """Eight streams; when each has 20 tokens, kill -9 the only node of `role`."""
    streams = [Stream() for _ in range(STREAMS)]
    async with httpx.AsyncClient(base_url=system.url, timeout=90.0) as client:
        events = [asyncio.Event() for _ in streams]
        tasks = [
            asyncio.create_task(read_stream(client, prompt, stream, event, **options))
            for prompt, stream, event in zip(prompts(num_ids), streams, events, strict=True)
        ]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 60)
        system.kill(role)
        await asyncio.wait_for(asyncio.gather(*tasks), 90)
    return streams


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, System]]:
    folder = tmp_path_factory.mktemp("kills")
    model = make_tiny(MODEL, folder / MODEL)
    args = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "600", "--local-prefill-tokens", "0")
    with running_system(folder, *args) as system:
        system.wait_usable()
        yield model, system


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_continue_exactly_or_end_in_a_clear_error_and_the_node_comes_back(
    served: tuple[Path, System], role: str
) -> None:
    model, system = served
    system.wait_usable()
    before = system.process(role)["pid"]
    streams = asyncio.run(stream_through(system, role))
    survived = 0
    for prompt, stream in zip(prompts(), streams, strict=True):
        expected = greedy(model, prompt, NEW_TOKENS)
        if stream.error is None:
            survived += 1
            assert stream.finish_reason == "length"
            assert len(stream.tokens) == NEW_TOKENS
        else:
            assert set(stream.error) == {"message", "type", "param", "code"}
            assert stream.error["message"]
        assert stream.done, "a stream ends with [DONE], also after an error"
        assert stream.tokens == expected.tokens[: len(stream.tokens)], "what was sent is right, and sent once"
    print(f"{role} killed: {survived} of {STREAMS} streams went on to their end")
    if role == "prefill":
        assert survived == STREAMS, "running streams do not need the prefill node any more"

    wait_until(lambda: system.is_restarted(role, before), 60, f"the {role} node is restarted")
    system.wait_usable()
    streams = asyncio.run(stream_through_quietly(system))
    for prompt, stream in zip(prompts(), streams, strict=True):
        assert stream.tokens == greedy(model, prompt, NEW_TOKENS).tokens
    system.wait_whole()


def test_streams_whose_tokens_a_draft_model_guesses_continue_exactly(tmp_path: Path) -> None:
    """The model is its own draft, which pays beside two stages that exchange each row. The node comes back without draft KV."""
    model = make_tiny(MODEL, tmp_path / MODEL)
    args = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "600", "--local-prefill-tokens", "0")
    with running_system(tmp_path, *args, "--decode-pp", "2", "--speculate", f"draft:{model}") as system:
        system.wait_usable()
        streams = asyncio.run(stream_through(system, "decode", temperature=0.8, seed=7))
        again = asyncio.run(stream_through_quietly(system, temperature=0.8, seed=7))
        for before, after in zip(streams, again, strict=True):
            assert after.finish_reason == "length"
            assert before.tokens == after.tokens[: len(before.tokens)]
        drafted = system.metric("vllm:spec_decode_num_draft_tokens_total", method="draft")
        assert drafted == system.metric("vllm:spec_decode_num_accepted_tokens_total", method="draft") > 0
        system.wait_whole()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_guessed_by_a_head_go_on_after_a_kill(tmp_path: Path, role: str) -> None:
    """The layer for multi-token prediction is always right, on the node that comes back too: KV and hidden rows were relayed anew."""
    model = make_mtp(small_vocabulary("glm4-moe"), tmp_path / MODEL, always_right(5, by_hidden=True))
    args = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "600", "--local-prefill-tokens", "0")
    with running_system(tmp_path, *args, "--speculate", "mtp", "--speculate-tokens", "2") as system:
        system.wait_usable()
        streams = asyncio.run(stream_through(system, role, temperature=0.0, num_ids=57))
        again = asyncio.run(stream_through_quietly(system, temperature=0.0, num_ids=57))
        for before, after in zip(streams, again, strict=True):
            assert after.finish_reason == "length"
            assert before.tokens == after.tokens[: len(before.tokens)]
        system.wait_whole()
        drafted = system.metric("vllm:spec_decode_num_draft_tokens_total", method="mtp")
        assert drafted == system.metric("vllm:spec_decode_num_accepted_tokens_total", method="mtp") > 0


async def stream_through_quietly(system: System, num_ids: int = 290, **options: Any) -> list[Stream]:
    streams = [Stream() for _ in range(STREAMS)]
    async with httpx.AsyncClient(base_url=system.url, timeout=90.0) as client:
        await asyncio.gather(
            *(
                read_stream(client, prompt, stream, asyncio.Event(), **options)
                for prompt, stream in zip(prompts(num_ids), streams, strict=True)
            )
        )
    return streams


def ask(system: System, prompt: list[int], tokens: int = 3) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{system.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=30.0)


def test_new_requests_work_within_5_s_of_a_redis_restart_and_nobody_else_restarts(served: tuple[Path, System]) -> None:
    model, system = served
    system.wait_usable()
    others = {entry["name"]: entry["pid"] for entry in system.processes() if entry["role"] != "redis"}
    redis_before = system.process("redis")["pid"]
    prompt = list(range(3, 53))
    expected = greedy(model, prompt, 3).tokens

    system.kill("redis")
    answer = ask(system, prompt)
    assert answer.status_code == 200, "serving goes on without Redis"
    assert answer.json()["choices"][0]["token_ids"] == expected

    wait_until(lambda: system.is_restarted("redis", redis_before), 30, "Redis is restarted")
    with SteadyTime() as since_the_restart:
        wait_until(lambda: system.health().get("degraded") is False, 20, "the router sees Redis again")
        answer = ask(system, prompt)
        assert answer.status_code == 200
        assert since_the_restart.passed_s < 5.0
    now = {entry["name"]: entry["pid"] for entry in system.processes() if entry["role"] != "redis"}
    assert now == others, "nothing but Redis was restarted"
    time_of_leases_s = time.monotonic() + 6
    wait_until(lambda: time.monotonic() > time_of_leases_s, 10, "two leases pass")
    health = system.health()
    assert (health["prefill"], health["decode"]) == (1, 1), "nodes stay known past their old leases"


def test_client_that_leaves_frees_both_nodes(served: tuple[Path, System]) -> None:
    _, system = served
    system.wait_usable()

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=system.url, timeout=30.0) as client:
            streams = [Stream() for _ in range(STREAMS)]
            events = [asyncio.Event() for _ in streams]
            tasks = [
                asyncio.create_task(read_stream(client, prompt, stream, event))
                for prompt, stream, event in zip(prompts(), streams, events, strict=True)
            ]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 60)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    system.wait_whole(timeout_s=10)
    assert system.metric("kvrelay_request_cancelled_total") >= STREAMS


def test_router_killed_frees_the_nodes_within_its_lease(served: tuple[Path, System]) -> None:
    _, system = served
    system.wait_usable()

    async def start_and_kill() -> int:
        async with httpx.AsyncClient(base_url=system.url, timeout=30.0) as client:
            streams = [Stream() for _ in range(STREAMS)]
            events = [asyncio.Event() for _ in streams]
            tasks = [
                asyncio.create_task(read_stream(client, prompt, stream, event))
                for prompt, stream, event in zip(prompts(), streams, events, strict=True)
            ]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 60)
            pid = system.kill("router")
            await asyncio.gather(*tasks, return_exceptions=True)
            return pid

    pid = asyncio.run(start_and_kill())
    wait_until(lambda: system.is_restarted("router", pid), 30, "the router is restarted")
    system.wait_usable()
    system.wait_whole(timeout_s=10)
    assert ask(system, [5, 6, 7]).status_code == 200


def test_stopped_decode_node_is_noticed_within_its_lease(served: tuple[Path, System]) -> None:
    """SIGSTOP: the connection stays open, but the process does not answer. Leases decide, not TCP."""
    _, system = served
    system.wait_usable()
    pid = system.kill("decode", number=signal.SIGSTOP)
    try:
        wait_until(lambda: system.health().get("decode") == 0, 10, "the silent node is not used any more")
        answer = ask(system, list(range(3, 53)))
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
    finally:
        os.kill(pid, signal.SIGCONT)
    system.wait_usable()
    wait_until(lambda: ask(system, list(range(3, 53))).status_code == 200, 20, "it serves again")
    system.wait_whole()


@pytest.mark.parametrize("name", ["large-vocabulary", "deepseek-v2"])
def test_sampled_streams_go_on_with_the_same_tokens(tmp_path: Path, name: str) -> None:
    """The more tokens there are, the more of a sampler's borders can move by the last bits of logits that are computed again.
    Latents that a prompt's rows expanded are absorbed by the rows of answers, and the other way round after a failure."""
    model = make_tiny(name, tmp_path / name)
    sampled = {"model": name, "temperature": 1.0, "seed": 7}
    with running_system(tmp_path, "--model", str(model), "--dtype", "float32", "--kv-blocks", "600") as system:
        system.wait_usable()
        quiet = asyncio.run(stream_through_quietly(system, **sampled))
        assert [len(stream.tokens) for stream in quiet] == [NEW_TOKENS] * STREAMS, [s.error for s in quiet]
        killed = asyncio.run(stream_through(system, "decode", **sampled))
        assert [stream.error for stream in killed] == [None] * STREAMS
        assert [stream.tokens for stream in killed] == [stream.tokens for stream in quiet]
        system.wait_usable()
        system.wait_whole()
