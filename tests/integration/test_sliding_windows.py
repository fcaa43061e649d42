"""Models with sliding windows through router, prefill node, relay and decode node: the tokens of transformers, and only the
KV that the decode node will read on the wire.

One model whose layers all have a window of 32 tokens, and one with layers of both kinds, hence several block tables.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.oracle import first_difference, greedy, write_model
from support.system import System, running_system
from transformers import Gemma3TextConfig, MistralConfig

from common.engine.kv_allocator import first_kept
from common.kv.rank_layout import blocks_for

WINDOW, NEW_TOKENS = 32, 64
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 100, 1000)
SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 112,
    "vocab_size": 264,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
    "sliding_window": WINDOW,
}
GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]


@dataclass(frozen=True)
class Model:
    config: Any
    windowed: int
    """Number of its layers with a window."""
    kv_blocks: int
    """Few enough that requests wait and sequences are preempted when all run at once."""


MODELS = {
    "mistral": Model(MistralConfig(num_hidden_layers=3, **SHAPE), windowed=3, kv_blocks=90),
    "gemma3": Model(
        Gemma3TextConfig(num_hidden_layers=4, **SHAPE, layer_types=GEMMA_LAYERS, pad_token_id=0),
        windowed=3,
        kv_blocks=400,
    ),
}


@dataclass
class Served:
    model: Model
    path: Path
    system: System

    @property
    def vocab_size(self) -> int:
        return SHAPE["vocab_size"]  # type: ignore[return-value]

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        fixed = {"model": self.path.name, "prompt": prompt, "temperature": 0, "ignore_eos": True}
        return {**fixed, "return_token_ids": True, "max_tokens": NEW_TOKENS, **more}

    def relayed_bytes(self, num_tokens: int) -> int:
        """What a prompt costs on the wire if the decode node holds none of it."""
        layer_bytes = 2 * 16 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4  # type: ignore[operator]
        total = blocks_for(num_tokens)
        windowed = total - first_kept(num_tokens, WINDOW)
        full = self.model.config.num_hidden_layers - self.model.windowed
        return layer_bytes * (full * total + self.model.windowed * windowed)


def serve(folder: Path, name: str, *args: str) -> Iterator[Served]:
    model = MODELS[name]
    path = write_model(model.config, folder / name)
    config = folder / "kvrelay.toml"
    config.write_text("[prefill]\nmax_num_batched_tokens = 64\n")
    fixed = ("--model", str(path), "--dtype", "float32", "--config", str(config), "--local-prefill-tokens", "0")
    with running_system(folder, *fixed, "--kv-blocks", str(model.kv_blocks), *args) as system:
        yield Served(model, path, system)


@pytest.fixture(scope="module", params=["gemma3", pytest.param("mistral", marks=pytest.mark.thorough)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    for served in serve(tmp_path_factory.mktemp(request.param), request.param):
        served.system.wait_usable()
        yield served
        served.system.wait_whole()


def check(served: Served, prompt: list[int], tokens: list[int], count: int = NEW_TOKENS) -> None:
    expected = greedy(served.path, prompt, count)
    where = first_difference(expected, tokens)
    assert where is None, f"prompt of {len(prompt)}: token {where} is {tokens[where]}, not {expected.tokens[where]}"
    assert len(tokens) == count


async def ask_all(served: Served, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=served.system.url, timeout=120.0) as client:
        bodies = [served.body(prompt, **more) for prompt in prompts]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [200] * len(prompts), answers[0].text
    return [answer.json()["choices"][0]["token_ids"] for answer in answers]


def test_a_relay_moves_the_blocks_that_the_decode_node_will_read_and_no_others(served: Served) -> None:
    draw = random.Random(5)
    for length in (16, 47, 48, 63, 300):
        before = served.system.metric("kvrelay_relayed_bytes_total")
        prompt = [draw.randrange(3, served.vocab_size) for _ in range(length)]
        [tokens] = asyncio.run(ask_all(served, [prompt], max_tokens=2))
        check(served, prompt, tokens, 2)
        moved = served.system.metric("kvrelay_relayed_bytes_total") - before
        assert moved == served.relayed_bytes(length), length


def test_tokens_equal_those_of_transformers_also_for_shorter_prompts_with_the_same_beginning(served: Served) -> None:
    draw = random.Random(7)
    prompts = [[draw.randrange(3, served.vocab_size) for _ in range(length)] for length in LENGTHS]
    for prompt, tokens in zip(prompts, asyncio.run(ask_all(served, prompts)), strict=True):
        check(served, prompt, tokens)
    served.system.wait_whole()
    # The decode node has only the windows of what came before.
    longest = prompts[-1]
    again = [longest[:160], longest[:992], longest[:49], longest + longest[:20], [*longest[:333], 3, 4]]
    for prompt, tokens in zip(again, asyncio.run(ask_all(served, again)), strict=True):
        check(served, prompt, tokens)
    for prompt in (longest[:160], longest[:500], longest):  # one by one, with what the nodes hold by now
        check(served, prompt, asyncio.run(ask_all(served, [prompt]))[0])


def test_the_samples_of_a_prompt_share_its_window_at_the_decode_node(served: Served) -> None:
    draw = random.Random(11)
    for length in (111, 300):
        prompt = [draw.randrange(3, served.vocab_size) for _ in range(length)]
        before = served.system.metric("kvrelay_relayed_bytes_total")
        computed = served.system.metric("kvrelay_node_prompt_tokens_total")
        tokens: list[list[int]] = [[] for _ in range(4)]
        hits = [0] * 4
        body = served.body(prompt, n=4, max_tokens=60, stream=True)
        with httpx.stream("POST", f"{served.system.url}/v1/completions", json=body, timeout=60.0) as answer:
            for line in answer.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
                for choice in event["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids", [])
                    if choice["finish_reason"]:
                        hits[choice["index"]] = event["kvrelay"]["decode_hit_tokens"]
        for each in tokens:
            check(served, prompt, each, 60)
        assert hits[1:] == [length - 1] * 3, "each of the other samples computes the last token alone"
        assert served.system.metric("kvrelay_relayed_bytes_total") - before == served.relayed_bytes(length)
        served.system.wait_whole()
        computed = served.system.metric("kvrelay_node_prompt_tokens_total") - computed
        assert computed < 2 * length, "of all nodes, as far as they have reported it"


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(MODELS))
def test_streams_go_on_with_the_same_tokens_when_their_decode_node_is_killed(tmp_path: Path, name: str) -> None:
    for served in serve(tmp_path, name, "--decode", "2", "--kv-blocks", "400"):
        system = served.system
        system.wait_usable(decode=2)
        draw = random.Random(9)
        prompts = [[draw.randrange(3, served.vocab_size) for _ in range(length)] for length in (20, 100, 400, 700)]

        async def scene(system: System = system, prompts: list[list[int]] = prompts, served: Served = served) -> Any:
            asked = asyncio.ensure_future(ask_all(served, prompts, max_tokens=600))
            pids = [entry["pid"] for entry in system.processes() if entry["role"] == "decode"]
            async with asyncio.timeout(60):
                while await asyncio.to_thread(system.metric, "vllm:num_requests_running") < len(prompts):
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            os.kill(pids[0], signal.SIGKILL)
            return await asked

        for prompt, tokens in zip(prompts, asyncio.run(scene()), strict=True):
            check(served, prompt, tokens, 600)
        system.wait_usable(decode=2)
        system.wait_whole()
