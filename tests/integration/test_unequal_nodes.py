"""Nodes of one model that differ: in their context, which decides where a request goes, and in what they answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from support.router_bench import Bench, play, script_of
from support.stub_node import StubNode
from tokenizers import Tokenizer

ANSWER = "it goes on, and on, and on, and on, until it ends with the end of the longer context of the other node"


async def _complete(bench: Bench, prompt: list[int], **fields: Any) -> Any:
    create: Any = bench.client.completions.create
    return await create(model="stub-model", prompt=prompt, **fields)


async def _get(bench: Bench, path: str) -> Any:
    async with httpx.AsyncClient() as client:
        return (await client.get(bench.stack.url + path)).json()


def test_requests_go_where_they_fit(model_folder: Path) -> None:
    """With the context of the shortest node as the model's, 28 of 28 longer prompts were a 400."""

    async def scene(bench: Bench) -> None:
        short = StubNode("decode", "short", str(model_folder), max_len=64)
        bench.stack.list_nodes(bench.prefill, bench.decode, short)
        await bench.stack.usable(1, 2)
        assert [each["max_model_len"] for each in (await _get(bench, "/v1/models"))["data"]] == [512]
        longer = [_complete(bench, [20 + number] * (64 + 16 * number), max_tokens=4) for number in range(28)]
        await asyncio.gather(*longer)
        assert len(bench.decode.requests()) == 28
        assert not short.requests()
        await asyncio.gather(*[_complete(bench, [50 + number] * 20, max_tokens=4) for number in range(28)])
        assert short.requests()

    play(model_folder, scene, config={"policy": "round_robin"})


def test_a_prompt_whose_only_node_is_gone_is_told_to_try_again(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        short = StubNode("decode", "short", str(model_folder), max_len=64)
        bench.stack.list_nodes(bench.prefill, bench.decode, short)
        await bench.stack.usable(1, 2)
        await bench.decode.close()  # it is still listed
        await bench.stack.usable(1, 1)
        body = {"model": "stub-model", "prompt": [20] * 80, "max_tokens": 4}
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{bench.stack.url}/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "no decode node takes 80 tokens now; try again"

    play(model_folder, scene)


def test_an_answer_that_outgrows_its_node_goes_on_at_a_larger_one(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scene(bench: Bench) -> None:
        create: Any = bench.client.chat.completions.create
        ask = {"model": "stub-model", "messages": [{"role": "user", "content": "until the end"}], "temperature": 0}
        undisturbed = await create(**ask)
        longest = undisturbed.usage.prompt_tokens + 8
        short = StubNode("decode", "short", str(model_folder), script=bench.decode.script, max_len=longest)
        bench.stack.list_nodes(bench.prefill, bench.decode, short)
        await bench.stack.usable(1, 2)
        bench.stack.router.dispatcher.state("stub-model").placer.models["decode"].costs.output_tokens = 4.0
        bench.decode.received.clear()
        answers = [await create(**ask) for _ in range(2)]  # round robin
        assert {answer.choices[0].message.content for answer in answers} == {ANSWER}
        assert [answer.usage for answer in answers] == [undisturbed.usage] * 2
        assert len(short.requests()) == 1
        (resumed,) = (request for request in bench.decode.requests() if request.key.attempt == 2)
        assert len(resumed.generated_ids) == 8

    play(model_folder, scene, config={"policy": "round_robin"}, script=script_of(ANSWER, tokenizer))


def test_nodes_that_would_answer_differently_get_nothing_and_health_says_so(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        other = StubNode("decode", "other", str(model_folder), fingerprint="stub-int8")
        bench.stack.list_nodes(bench.prefill, bench.decode, other)
        await bench.stack.usable(1, 1)
        for number in range(4):
            await _complete(bench, [20 + number] * 20, max_tokens=4)
        assert not other.requests()
        (why,) = (await _get(bench, "/health"))["ignored_nodes"]
        assert why.startswith(
            "other is ignored: it would answer otherwise than d0: its fingerprint is 'stub-int8', not 'stub'"
        )
        bench.stack.list_nodes(bench.prefill, other)  # the last of the others is gone
        await bench.stack.usable(0, 1)
        await _complete(bench, [90] * 20, max_tokens=4)
        assert other.requests()

    play(model_folder, scene, config={"policy": "round_robin"})
