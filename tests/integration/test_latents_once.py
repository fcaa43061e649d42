"""Latents are relayed once for each stage of a decode node, whatever the number of its ranks: its ranks hand them on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from support.oracle import TINY, greedy, make_tiny
from support.system import ranks_of, running_system, wait_until

from common.model.config import load_model_config
from common.model.kv_spec import kv_spec

NAME, TOKENS = "deepseek-v2", 24


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "decode_pp"),
    [(1, 4, 1), pytest.param(2, 2, 2, marks=pytest.mark.thorough)],
)
def test_a_token_costs_the_latents_width_once_and_a_killed_rank_costs_no_answer(
    tmp_path: Path, prefill_tp: int, decode_tp: int, decode_pp: int
) -> None:
    model = make_tiny(NAME, tmp_path / NAME)
    spec = kv_spec(load_model_config(model), "float32")
    vocab = TINY[NAME].vocab_size
    prompts = [[(11 * i + 7 * j) % (vocab - 3) + 3 for j in range(16 * (2 + i))] for i in range(6)]
    with running_system(
        tmp_path,
        *("--model", str(model), "--dtype", "float32", "--local-prefill-tokens", "0", "--start-timeout-s", "240"),
        *("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp), "--decode-pp", str(decode_pp)),
        *("--kv-blocks", "300"),
    ) as system:
        system.wait_usable(timeout_s=240)

        async def ask(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
            body = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["token_ids"]

        async def ask_all() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=system.url, timeout=120.0) as client:
                return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

        async def ask_while_a_rank_dies() -> list[list[int]]:
            leader = system.process("decode")["pid"]
            asking = asyncio.create_task(ask_all())
            await asyncio.sleep(0.1)
            os.kill(ranks_of(leader)[0], signal.SIGKILL)
            return await asking

        expected = [greedy(model, prompt, TOKENS).tokens for prompt in prompts]
        assert asyncio.run(ask_all()) == expected
        once = spec.bytes_per_token * sum(map(len, prompts))
        wait_until(
            lambda: system.metric("kvrelay_relay_bytes_total", node="prefill-0") >= once,
            20,
            "the relayed bytes are counted",
        )
        assert system.metric("kvrelay_relay_bytes_total", node="prefill-0") == once, "a latent came more than once"
        assert asyncio.run(ask_all()) == expected, "the prefix cache has what every rank was handed"
        old = system.process("decode")["pid"]
        assert asyncio.run(ask_while_a_rank_dies()) == expected
        wait_until(lambda: system.is_restarted("decode", old), 60, "the node is restarted")
        system.wait_usable(timeout_s=240)
        assert asyncio.run(ask_all()) == expected
        system.wait_whole()
