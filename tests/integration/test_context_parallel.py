"""Nodes whose ranks hold every N-th block of a sequence: greedy float32 tokens equal those of `transformers`.

Real nodes of several processes each, prompts of 1 to 1,000 tokens at once, in chunks and with shared prefixes. One rank of a
decode node could not hold the longest. One case covers windows, sinks and stripes on both sides; the others run in `make test-all`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from integration.test_parallel_matrix import ask_all
from integration.test_parallel_matrix import make_prompts as matrix_prompts
from support.oracle import TINY, first_difference, greedy, make_tiny
from support.system import System, ranks_of, running_system, wait_until

from common.model.config import load_model_config
from common.model.kv_spec import kv_spec

NEW_TOKENS = 40
PREFILL_CHUNK = 96
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 250, 500, 1000)

Sizes = tuple[int, int, int, int, int]
"""(prefill cp, prefill tp, decode cp, decode tp, decode pp)"""

COVERING: list[tuple[str, Sizes]] = [("gpt-oss", (2, 1, 2, 1, 1))]
THOROUGH: list[tuple[str, Sizes]] = [
    ("llama", (1, 1, 2, 1, 1)),
    ("llama", (1, 1, 4, 1, 1)),
    ("llama", (4, 1, 1, 1, 1)),
    ("qwen3", (1, 2, 2, 2, 1)),
    ("qwen3", (2, 2, 2, 1, 2)),
    ("mqa", (4, 1, 2, 1, 2)),
    ("deepseek-v3", (1, 1, 2, 1, 1)),
    ("deepseek-v2", (2, 1, 4, 1, 1)),
    ("gemma3", (1, 1, 2, 1, 1)),
    ("gemma2", (2, 1, 4, 1, 1)),
    ("qwen2-window", (1, 1, 2, 2, 1)),
    ("gpt-oss", (1, 2, 2, 2, 1)),
]
CASES = [*COVERING, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)]


def make_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    draw = random.Random(vocab_size)
    base = [draw.randrange(3, vocab_size) for _ in range(longest)]
    alone = [[draw.randrange(3, vocab_size) for _ in range(n)] for n in LENGTHS if n <= longest]
    sharing = [[*base[:n], 3 + i] for i, n in enumerate((16, 40, 150)) if n < longest]
    return alone + sharing


def node_options(sizes: Sizes) -> list[str]:
    names = ("prefill-context-parallel", "prefill-tp", "decode-context-parallel", "decode-tp", "decode-pp")
    return [word for name, size in zip(names, sizes, strict=True) for word in (f"--{name}", str(size))]


def check_answers(system: System, model: Path, name: str, prompts: list[list[int]]) -> None:
    for prompt, answer in zip(prompts, asyncio.run(ask_all(system.url, name, prompts)), strict=True):
        where = first_difference(greedy(model, prompt, NEW_TOKENS), answer["choices"][0]["token_ids"])
        assert where is None, f"prompt of {len(prompt)} tokens: wrong from token {where} on"


@pytest.mark.parametrize(
    ("name", "sizes"), CASES, ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each))
)
def test_tokens_of_striped_contexts_equal_those_of_transformers(name: str, sizes: Sizes, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / name)
    num_tables = kv_spec(load_model_config(model), "float32").num_tables
    longest = min(1000, TINY[name].config.get_text_config().max_position_embeddings - NEW_TOKENS)
    prompts = make_prompts(TINY[name].vocab_size, longest)
    config = tmp_path / "nodes.toml"
    decode_blocks = (longest + NEW_TOKENS) // 16 // sizes[2] + 2
    config.write_text(
        f"[prefill]\nkv_blocks = {400 * num_tables}\nmax_num_batched_tokens = {PREFILL_CHUNK}\n"
        f"[decode]\nkv_blocks = {decode_blocks * num_tables}\n"
    )
    with running_system(
        tmp_path,
        *("--model", str(model), "--dtype", "float32", "--max-num-seqs", "16"),
        *("--config", str(config), "--start-timeout-s", "240", "--local-prefill-tokens", "0"),
        *node_options(sizes),
    ) as system:
        system.wait_usable(timeout_s=240)
        check_answers(system, model, name, prompts)
        assert system.metric("kvrelay_relay_bytes_total") > 0, "the relay is real"
        system.wait_whole()


def check_a_killed_rank(system: System, model: Path, name: str, prompts: list[list[int]], new_tokens: int) -> None:
    """Kill a rank of one of two decode nodes while all requests run and sequences are preempted: no answer changes."""
    node = next(each for each in system.processes() if each["name"] == "decode-0")
    (rank,) = ranks_of(node["pid"])

    async def ask() -> list[dict[str, Any]]:
        asked = asyncio.create_task(ask_all(system.url, name, prompts, new_tokens))
        preempted, running = "vllm:num_preemptions_total", "vllm:num_requests_running"
        while not (system.metric(preempted, role="decode") and system.metric(running, node="decode-0")):
            assert not asked.done(), "sequences are preempted"
            await asyncio.sleep(0.05)
        os.kill(rank, signal.SIGKILL)
        return await asked

    for prompt, answer in zip(prompts, asyncio.run(ask()), strict=True):
        where = first_difference(greedy(model, prompt, new_tokens), answer["choices"][0]["token_ids"])
        assert where is None, f"prompt of {len(prompt)} tokens: wrong from token {where} on"
    wait_until(lambda: system.is_restarted("decode", node["pid"]), 60, "the node is restarted")
    assert system.metric("kvrelay_retries_total") > 0, "streams of the killed node went on at the other"
    system.wait_usable(decode=2, timeout_s=120)
    system.wait_whole()


def test_streams_of_striped_contexts_go_on_after_preemptions_and_a_killed_rank(tmp_path: Path) -> None:
    """Two decode nodes of two ranks each, with few blocks: while all requests run, a rank of one node is killed."""
    model, new_tokens = make_tiny("qwen3", tmp_path / "qwen3"), 80
    prompts = matrix_prompts(TINY["qwen3"].vocab_size)
    config = tmp_path / "nodes.toml"
    config.write_text("[prefill]\nkv_blocks = 200\n[decode]\nkv_blocks = 11\ndecode_context_parallel = 2\n")
    with running_system(
        tmp_path,
        *("--model", str(model), "--dtype", "float32", "--config", str(config), "--start-timeout-s", "240"),
        *("--local-prefill-tokens", "0", "--decode", "2", "--decode-context-parallel", "2", "--speculate", "suffix"),
    ) as system:
        system.wait_usable(decode=2, timeout_s=240)
        check_a_killed_rank(system, model, "qwen3", prompts, new_tokens)
