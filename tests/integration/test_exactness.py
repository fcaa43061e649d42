"""Greedy float32 tokens through router, prefill node, relay and decode node equal transformers' `generate`.

Real processes. Each model family runs once with another chunk size and shape; all chunk sizes against all families
are compared at the runner, in tests/unit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.oracle import TINY, agreed, first_difference, greedy, make_tiny, most_likely_sequences
from support.system import System, running_system

from common.engine.kv_allocator import first_kept
from common.kv.rank_layout import blocks_for
from common.model.config import load_model_config

NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 1000)


@dataclass(frozen=True)
class Case:
    """One system: a model, the prefill node's chunk size, and what else is special."""

    model: str
    chunk: int
    kv_blocks: int
    local_prefill_tokens: int = 0
    """0: every prompt is relayed."""
    ahead: bool = False
    """Asynchronous scheduling: the next step is prepared while one runs."""


CASES = [
    Case("llama", chunk=1, kv_blocks=400),
    Case("llama-biases", chunk=16, kv_blocks=400),
    Case("llama3", chunk=64, kv_blocks=80, ahead=True),  # too few for all at once: grants wait, sequences are preempted
    Case("llama-linear", chunk=2048, kv_blocks=400, local_prefill_tokens=32),
    Case("mistral", chunk=16, kv_blocks=400, ahead=True),
    Case("qwen2", chunk=64, kv_blocks=400, local_prefill_tokens=2000),
    Case("qwen3", chunk=2048, kv_blocks=400),
    Case("deepseek-v2", chunk=64, kv_blocks=80, ahead=True),
]
LATER = [
    Case("phi3", chunk=64, kv_blocks=400, ahead=True),
    Case("granite", chunk=16, kv_blocks=400),
    Case("smollm3", chunk=64, kv_blocks=400, ahead=True),
    Case("olmo2", chunk=2048, kv_blocks=400),
    Case("starcoder2", chunk=64, kv_blocks=400, ahead=True),
    Case("gpt2", chunk=16, kv_blocks=400),
    Case("opt", chunk=64, kv_blocks=80, ahead=True),
    Case("gemma2", chunk=64, kv_blocks=600, ahead=True),
    Case("gemma3", chunk=16, kv_blocks=800),
    Case("gemma3-vision", chunk=2048, kv_blocks=800),
    Case("qwen2-window", chunk=64, kv_blocks=600, ahead=True),
    Case("qwen2.5-vl", chunk=16, kv_blocks=400),
    Case("qwen3-moe", chunk=64, kv_blocks=80, ahead=True),
    Case("mixtral", chunk=16, kv_blocks=400),
    Case("gpt-oss", chunk=64, kv_blocks=600, ahead=True),
    Case("glm4-moe", chunk=2048, kv_blocks=400),
    Case("granite-moe", chunk=1, kv_blocks=400),
    Case("deepseek-v3", chunk=2048, kv_blocks=400, local_prefill_tokens=32),
]
"""Families that the tests of the runner cover by default."""
PARAMS = [*CASES, *(pytest.param(case, marks=pytest.mark.thorough) for case in LATER)]


@pytest.fixture(scope="module", params=PARAMS, ids=lambda case: f"{case.model}-chunk{case.chunk}")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Case, Path, System]]:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.model)
    model = make_tiny(case.model, folder / case.model)
    config = folder / "kvrelay.toml"
    config.write_text(f"[prefill]\nmax_num_batched_tokens = {case.chunk}\n")
    with running_system(
        folder,
        *("--model", str(model), "--dtype", "float32", "--config", str(config)),
        *("--kv-blocks", str(case.kv_blocks), "--local-prefill-tokens", str(case.local_prefill_tokens)),
        "--async-scheduling" if case.ahead else "--no-async-scheduling",
    ) as system:
        system.wait_usable()
        yield case, model, system
        system.wait_whole()


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All requests at once; each must succeed."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json() for answer in answers]


def body(model: Path, prompt: list[int], **more: Any) -> dict[str, Any]:
    fixed = {"model": model.name, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, "max_tokens": NEW_TOKENS, "logprobs": 1, **more}


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Every length, and two that share a long prefix with the longest."""
    draw = random.Random(vocab_size)
    prompts = [[draw.randrange(3, vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]
    return [*prompts, [*prompts[-1][:333], 3, 4], prompts[-1][:160]]


def test_greedy_tokens_and_logprobs_equal_transformers(served: tuple[Case, Path, System], record_property: Any) -> None:
    case, model, system = served
    vocab_size = TINY[case.model].vocab_size
    prompts = make_prompts(vocab_size)
    answers = asyncio.run(ask_all(system.url, [body(model, prompt) for prompt in prompts]))
    excused = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        choice = answer["choices"][0]
        expected = greedy(model, prompt, NEW_TOKENS)
        tokens = choice["token_ids"]
        where = first_difference(expected, tokens)
        assert where is None, f"prompt of {len(prompt)}: token {where} is {tokens[where]}, not {expected.tokens[where]}"
        same = agreed(expected, tokens)
        excused += same < NEW_TOKENS
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs[:same] == pytest.approx(expected.logprobs[:same], abs=1e-4)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == NEW_TOKENS
        assert choice["finish_reason"] == "length"
    print(f"{case.model}: {excused} of {len(prompts)} texts excused by a top-2 gap under 1e-4")
    record_property("excused", excused)
    assert excused <= 1


def test_relay_moves_exactly_the_bytes_that_the_layout_says(served: tuple[Case, Path, System]) -> None:
    case, model, system = served
    config = load_model_config(model)
    attention = config.layers[0].attention
    block_bytes = 16 * attention.plane_heads * sum(plane.width for plane in attention.planes) * 4  # of one layer

    def needed(num_tokens: int, held: int = 0) -> int:
        """Bytes of the blocks to keep of `num_tokens`, without the first `held` blocks."""
        firsts = [max(held, first_kept(num_tokens, layer.attention.window)) for layer in config.layers]
        return block_bytes * sum(blocks_for(num_tokens) - first for first in firsts)

    def moved(prompt: list[int]) -> tuple[float, str]:
        before = system.metric("kvrelay_relayed_bytes_total")
        with httpx.Client(timeout=60.0) as client:
            answer = client.post(f"{system.url}/v1/completions", json=body(model, prompt, max_tokens=2))
        assert answer.status_code == 200
        return system.metric("kvrelay_relayed_bytes_total") - before, answer.headers["x-kvrelay-prefill-mode"]

    system.wait_whole()
    draw = random.Random(1)
    prompt = [draw.randrange(3, config.vocab_size) for _ in range(100)]
    if len(prompt) <= case.local_prefill_tokens:
        assert moved(prompt) == (0, "local")
        return
    assert moved(prompt) == (needed(100), "relayed")
    # The decode node holds the six full blocks; the seventh, and what is new, must come.
    longer = prompt + [draw.randrange(3, config.vocab_size) for _ in range(50)]
    assert moved(longer) == (needed(150, 6), "relayed")
    # All nine blocks are there, but those behind sliding windows; once the router has heard of it, it asks for no relay at all.
    windows = [layer.attention.window for layer in config.layers]
    at_most = block_bytes * sum(9 - first_kept(144, window) for window in windows if window is not None)
    assert moved(longer[:144])[0] <= at_most


def test_a_beam_search_finds_what_a_plain_one_finds(served: tuple[Case, Path, System]) -> None:
    case, model, system = served
    ends = load_model_config(model).eos_token_ids
    draw = random.Random(7)
    prompts = [[draw.randrange(3, TINY[case.model].vocab_size) for _ in range(length)] for length in (5, 40)]
    fields = {"use_beam_search": True, "max_tokens": 10, "n": 3, "logprobs": 1, "return_token_ids": True}
    (answer,) = asyncio.run(ask_all(system.url, [{"prompt": prompts, **fields}]))
    for at, prompt in enumerate(prompts):
        expected = most_likely_sequences(model, prompt, width=3, steps=10, ends=ends)
        found = answer["choices"][3 * at : 3 * at + 3]
        assert [tuple(choice["token_ids"]) for choice in found] == [tokens for tokens, _ in expected]
        totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in found]
        assert totals == pytest.approx([total for _, total in expected], abs=1e-3)
    assert answer["usage"]["prompt_tokens"] == 45
