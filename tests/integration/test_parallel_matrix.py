"""Any prefill layout to any decode layout: greedy float32 tokens equal the single-process reference.

Real nodes of several processes each. Sixteen requests at once, lengths mixed, prefixes shared, prompts in chunks, and so
few KV blocks that sequences are preempted. The subset here covers every size, both ways of spreading KV heads and every
transport; over gloo the next step is prepared while one runs. Where decode nodes have tensor-parallel ranks, they guess tokens
and verify them. `make test-matrix` runs every combination.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.oracle import TINY, first_difference, greedy, make_tiny
from support.system import running_system

from common.model.config import load_model_config
from common.model.kv_spec import kv_spec

NEW_TOKENS = 40
"""Three blocks of growth: more than a node reserves for running sequences, so that some are preempted."""
NUM_REQUESTS = 16
PREFILL_CHUNK = 96

Layout = tuple[str, int, int, int, str]
"""(model, prefill tp, decode tp, decode pp, transport)"""

TRANSPORTS = {"zmq": "zmq", "shm": "shm", "collective": "gloo"}
"""What is asked for, and what it is on CPUs."""

MODELS = {1: "mqa", 2: "qwen3", 4: "llama"}
"""By KV heads; three layers, so that two stages are uneven."""

COVERING: list[Layout] = [
    ("llama", 1, 2, 1, "collective"),
    ("qwen3", 2, 1, 2, "shm"),
    ("qwen3", 2, 2, 2, "zmq"),
    ("mqa", 2, 1, 3, "collective"),
    ("mqa", 4, 2, 1, "zmq"),
    ("llama", 1, 4, 1, "shm"),
]
ALL: list[Layout] = [
    (model, prefill_tp, decode_tp, decode_pp, transport)
    for prefill_tp, decode_tp, decode_pp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 3))
    for model in (MODELS[(1, 2, 4)[(prefill_tp + decode_tp + decode_pp) % 3]],)
    for transport in TRANSPORTS
]

FAMILIES: list[Layout] = [
    (model, 2, 2, 2, transport)
    for model, transport in zip(
        (
            *("phi3", "granite", "smollm3", "olmo2", "starcoder2", "gpt2", "opt", "gemma3"),
            *("gemma2", "gemma3-vision", "qwen2-window", "qwen2.5-vl", "mistral"),
            *("qwen3-moe", "mixtral", "gpt-oss", "glm4-moe", "granite-moe"),
        ),
        itertools.cycle(TRANSPORTS),
        strict=False,
    )
]

LATENT: list[Layout] = [("deepseek-v3", 2, 2, 2, "shm"), ("deepseek-v2", 1, 4, 1, "zmq")]
"""Planes without heads, which every rank of a stage holds whole."""
ALL_LATENT: list[Layout] = [
    (("deepseek-v2", "deepseek-v3")[number % 2], *sizes, tuple(TRANSPORTS)[number % 3])
    for number, sizes in enumerate(itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 3)))
]

_THOROUGH = [layout for layout in [*ALL, *FAMILIES, *ALL_LATENT] if layout not in [*COVERING, *LATENT]]
CASES = [*COVERING, *LATENT, *(pytest.param(*layout, marks=pytest.mark.thorough) for layout in _THOROUGH)]


def make_prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(vocab_size)
    base = [draw.randrange(3, vocab_size) for _ in range(200)]
    prompts = []
    for number in range(NUM_REQUESTS):
        shared = base[: draw.choice((0, 16, 40, 96, 150))]
        own = [draw.randrange(3, vocab_size) for _ in range(draw.choice((1, 15, 33, 70)))]
        prompts.append([*shared, *own, 3 + number])
    return prompts


async def ask_all(url: str, model: str, prompts: list[list[int]], num_tokens: int = NEW_TOKENS) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=180.0) as client:

        async def ask(prompt: list[int]) -> dict[str, Any]:
            body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert answer.status_code == 200, answer.text
            return answer.json()

        return await asyncio.gather(*(ask(prompt) for prompt in prompts))


@pytest.mark.parametrize("layouts", [ALL, COVERING], ids=["all", "covering"])
def test_the_layouts_cover_every_size_and_both_ways_of_spreading_heads(layouts: list[Layout]) -> None:
    heads = {name: count for count, name in MODELS.items()}
    assert {name for name, *_ in layouts} == set(heads)
    assert [{sizes[i] for _, *sizes in layouts} for i in range(3)] == [{1, 2, 4}, {1, 2, 4}, {1, 2, 3}]
    for transport in TRANSPORTS:
        its = [layout for layout in layouts if layout[4] == transport]
        assert any(layout[1] != layout[2] for layout in its), "heads are spread anew"
        assert any(layout[3] > 1 for layout in its), "layers are spread anew"
    for side in (1, 2):
        assert any(layout[side] > heads[layout[0]] for layout in layouts), "heads are replicated"
        assert any(1 < layout[side] <= heads[layout[0]] for layout in layouts), "heads are split"
    assert any(layout[3] == 2 for layout in layouts), "three layers on two stages are uneven"


@pytest.mark.parametrize(("name", "prefill_tp", "decode_tp", "decode_pp", "transport"), CASES)
def test_tokens_equal_the_reference(
    name: str, prefill_tp: int, decode_tp: int, decode_pp: int, transport: str, tmp_path: Path
) -> None:
    model = make_tiny(name, tmp_path / name)
    prompts = make_prompts(TINY[name].vocab_size)
    config = tmp_path / "kvrelay.toml"
    method = "suffix" if decode_tp > 1 and decode_pp == 1 else "draft"
    tables = kv_spec(load_model_config(model), "float32").num_tables
    config.write_text(
        f"[prefill]\nmax_num_batched_tokens = {PREFILL_CHUNK}\nkv_blocks = {60 * tables}\n"
        f"[decode]\nkv_blocks = {26 * tables}\n"
    )
    with running_system(
        tmp_path,
        *("--model", str(model), "--dtype", "float32", "--config", str(config), "--start-timeout-s", "240"),
        *("--local-prefill-tokens", "0", "--kv-transport", transport),
        *("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp), "--decode-pp", str(decode_pp)),
        *("--speculate", method if method == "suffix" else f"draft:{model}"),
        "--async-scheduling" if transport == "collective" else "--no-async-scheduling",
    ) as system:
        system.wait_usable(timeout_s=240)
        answers = asyncio.run(ask_all(system.url, name, prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = answer["choices"][0]["token_ids"]
            where = first_difference(greedy(model, prompt, NEW_TOKENS), tokens)
            assert where is None, f"prompt of {len(prompt)} tokens: wrong from token {where} on"
        assert max(map(len, prompts)) > PREFILL_CHUNK, "prompts are computed in chunks"
        relayed, taken = system.metric("kvrelay_relay_bytes_total"), TRANSPORTS[transport]
        assert relayed > 0, "the relay is real"
        assert system.metric("kvrelay_relay_bytes_total", transport=taken) == relayed, "it took another transport"
        assert system.metric("vllm:num_preemptions_total", role="decode") > 0, "sequences were preempted"
        # How many guesses there are follows from measured times; tests/unit/common/engine/test_drafting.py makes some fail.
        drafted = system.metric("vllm:spec_decode_num_draft_tokens_total", method=method)
        accepted = system.metric("vllm:spec_decode_num_accepted_tokens_total", method=method)
        assert drafted >= accepted >= 0
        assert method == "suffix" or accepted == drafted, "a draft that is the target is always right"
        print(method, drafted, accepted)
        system.wait_whole()
