"""A seeded request with penalties has the same tokens alone, in a batch with others, and on any nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from support.oracle import make_tiny
from support.system import running_system


def test_same_seed_same_tokens_alone_in_a_crowd_and_on_other_nodes(tmp_path: Path) -> None:
    model = make_tiny("qwen3", tmp_path / "qwen3")

    def body(prompt: list[int], seed: int) -> dict[str, Any]:
        return {
            "model": "qwen3",
            "prompt": prompt,
            "max_tokens": 40,
            "temperature": 0.9,
            "top_p": 0.95,
            "top_k": 50,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.1,
            "logit_bias": {"20": 3},
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    async def ask(client: httpx.AsyncClient, prompt: list[int], seed: int) -> tuple[list[int], str]:
        answer = await client.post("/v1/completions", json=body(prompt, seed))
        assert answer.status_code == 200, answer.text
        nodes = f"{answer.headers['x-kvrelay-prefill-node']} {answer.headers['x-kvrelay-decode-node']}"
        return answer.json()["choices"][0]["token_ids"], nodes

    async def run(url: str) -> None:
        prompt = list(range(10, 70))
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            alone, _ = await ask(client, prompt, 7)
            other_seed, _ = await ask(client, prompt, 8)
            assert other_seed != alone
            crowd = [ask(client, [*range(100 + n, 150 + n)], n) for n in range(24)]
            asked = await asyncio.gather(*(ask(client, prompt, 7) for _ in range(8)), *crowd)
            assert all(tokens == alone for tokens, _ in asked[:8])
            assert len({nodes for _, nodes in asked[:8]}) > 1, "the crowd should spread over nodes"

    args = ("--model", str(model), "--dtype", "float32", "--prefill", "2", "--decode", "2", "--kv-blocks", "400")
    with running_system(tmp_path, *args, "--local-prefill-tokens", "0", "--policy", "round_robin") as system:
        system.wait_usable(prefill=2, decode=2)
        asyncio.run(run(system.url))
        system.wait_whole()
