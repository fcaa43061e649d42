"""Models that classes of transformers compute, through router, prefill node, relay and decode node: greedy float32 tokens
equal those of `generate`."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.generic_models import config_of
from support.oracle import first_difference, greedy, write_model
from support.system import System, running_system

NEW_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """A kind of `support.generic_models.KINDS` on nodes with some ranks."""

    kind: str
    prefill: str = ""
    decode: str = ""
    lengths: tuple[int, ...] = (1, 15, 16, 17, 100, 1000)


THOROUGH = [
    Case("phi", decode="tensor_parallel_size = 2"),
    Case("qwen3_moe", prefill="tensor_parallel_size = 2"),
    Case("gpt_neox", decode="pipeline_parallel_size = 2"),
    Case("cohere2", prefill="tensor_parallel_size = 2", decode="pipeline_parallel_size = 2"),
    Case("deepseek_v3"),
    Case("gpt_bigcode"),
    Case("olmo2", decode="tensor_parallel_size = 2"),
    Case("mixtral", prefill="tensor_parallel_size = 2"),
    Case("seed_oss", decode="pipeline_parallel_size = 2"),
    Case("gpt_oss", decode="pipeline_parallel_size = 2"),
    Case("granite_swa", decode="tensor_parallel_size = 2"),
    *map(Case, ("arcee", "cohere", "ernie4_5", "exaone4", "glm", "granitemoe", "helium", "nemotron")),
    *map(Case, ("olmo3", "olmoe", "phimoe", "qwen2_moe")),
]
CASES = [
    Case("glm4", lengths=(1, 17, 100)),
    *(pytest.param(case, marks=pytest.mark.thorough) for case in THOROUGH),
]


def make_folder(kind: str, folder: Path) -> Path:
    return write_model(config_of(kind), folder / kind)


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json() for answer in answers]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_greedy_tokens_equal_transformers(case: Case, tmp_path: Path) -> None:
    model = make_folder(case.kind, tmp_path)
    config = tmp_path / "kvrelay.toml"
    config.write_text(f"[prefill]\nmax_num_batched_tokens = 64\n{case.prefill}\n[decode]\n{case.decode}\n")
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 250) for _ in range(length)] for length in case.lengths]
    fixed = {"model": model.name, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running_system(
        tmp_path,
        *("--model", str(model), "--dtype", "float32", "--config", str(config), "--kv-blocks", "400"),
        *("--local-prefill-tokens", "0", "--model-impl", "transformers"),
    ) as system:
        system.wait_usable()
        bodies = [{**fixed, "prompt": prompt, "max_tokens": NEW_TOKENS} for prompt in prompts]
        answers = asyncio.run(ask_all(system.url, bodies))
        system.wait_whole()
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer["choices"][0]["token_ids"]
        where = first_difference(greedy(model, prompt, NEW_TOKENS), tokens)
        assert where is None, f"prompt of {len(prompt)}: token {where} differs"


async def _stream_through_a_kill(system: System, model: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens of a stream whose decode node is killed once ten have come."""
    body = {
        "model": model.name,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    is_killed = False
    async with (
        httpx.AsyncClient(base_url=system.url, timeout=120.0) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
            if len(tokens) >= 10 and not is_killed:
                is_killed = True
                system.kill("decode")
    return tokens


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "implementation"), [("gemma2", "transformers"), ("gpt_oss", "native"), ("glm4_moe", "native")]
)
def test_stream_goes_on_after_kill_9_of_the_decode_node(tmp_path: Path, kind: str, implementation: str) -> None:
    """Also of mixtures that native families compute."""
    model = make_folder(kind, tmp_path)
    prompt = [3 + 7 * i % 240 for i in range(70)]
    options = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "400", "--local-prefill-tokens", "0")
    with running_system(tmp_path, *options, "--model-impl", implementation) as system:
        system.wait_usable()
        tokens = asyncio.run(_stream_through_a_kill(system, model, prompt, 300))
        system.wait_usable()
        system.wait_whole()
    assert len(tokens) == 300
    assert first_difference(greedy(model, prompt, 300), tokens) is None
