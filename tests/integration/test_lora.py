"""LoRA adapters through router, prefill node, relay and decode node: every answer equals that of a model whose weights have
the adapter merged in, computed by transformers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.lora_files import merge, write_adapter
from support.oracle import first_difference, greedy, make_tiny
from support.system import System, running_system, wait_until

pytestmark = pytest.mark.thorough

NUM_ADAPTERS = 8
NEW_TOKENS = 24
OPTIONS = (
    *("--dtype", "float32", "--kv-blocks", "600", "--local-prefill-tokens", "0", "--allow-runtime-lora", "true"),
    *("--speculate", "suffix"),
)


@dataclass
class Adapters:
    """A base model, adapters of it, and for each a copy of the model with the adapter merged in."""

    folder: Path
    base: Path = field(init=False)
    files: dict[str, Path] = field(default_factory=dict[str, Path])
    merged: dict[str, Path] = field(default_factory=dict[str, Path])

    def __post_init__(self) -> None:
        self.base = self.merged["base"] = make_tiny("qwen2", self.folder / "base")
        for number in range(NUM_ADAPTERS):
            self.add(f"ad{number}", rank=1 + 3 * number, seed=number)

    def add(self, name: str, *, rank: int, seed: int) -> Path:
        self.files[name] = write_adapter(self.folder / f"lora-{name}", self.base, rank=rank, seed=seed)
        self.merged[name] = merge(self.base, self.files[name], self.folder / f"merged-{name}")
        return self.files[name]

    @contextmanager
    def served(self, folder: Path, names: Sequence[str], *options: str) -> Iterator[System]:
        """A cluster with these adapters; at its end all blocks must be free."""
        given = [f"{name}={self.files[name]}" for name in names]
        with running_system(
            folder, "--model", str(self.base), *OPTIONS, "--lora-dir", str(self.folder), *options, "--lora", *given
        ) as system:
            system.wait_usable()
            wait_until(lambda: set(names) <= listed(system), 30, "the adapters are listed")
            yield system
            system.wait_whole()

    def check(self, name: str, prompt: list[int], tokens: list[int]) -> None:
        where = first_difference(greedy(self.merged[name], prompt, len(tokens)), tokens)
        assert where is None, f"{name}, prompt of {len(prompt)}: token {where} differs"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


def listed(system: System) -> set[str]:
    return {card["id"] for card in httpx.get(f"{system.url}/v1/models").json()["data"]}


def prompt_of(length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 290) for _ in range(length)]


def body(model: str, prompt: list[int], tokens: int = NEW_TOKENS, **more: Any) -> dict[str, Any]:
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": prompt, "max_tokens": tokens, **fixed, **more}


@asynccontextmanager
async def client_of(system: System) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=system.url, timeout=120.0, limits=limits) as client:
        yield client


async def ask(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client: httpx.AsyncClient, request: dict[str, Any], tokens: list[int]) -> list[int]:
    """Add the answer's tokens to `tokens` as they come."""
    async with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
    return tokens


async def change(client: httpx.AsyncClient, verb: str, name: str, path: Path | None = None) -> None:
    request = {"lora_name": name} if path is None else {"lora_name": name, "lora_path": str(path)}
    answer = await client.post(f"/v1/{verb}_lora_adapter", json=request)
    assert answer.status_code == 200, answer.text


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def cached(answer: dict[str, Any]) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


@pytest.mark.parametrize("ranks", [(), ("--prefill-tp", "2", "--decode-pp", "2")], ids=["tp1", "tp2-pp2"])
def test_eight_adapters_and_the_base_in_one_batch_equal_merged_weights(
    ranks: tuple[str, ...], adapters: Adapters, tmp_path: Path
) -> None:
    lengths = (1, 15, 16, 17, 100, 1000)
    names = [name for name in adapters.merged if name != "other"]
    cases = [(name, prompt_of(length, seed=length)) for length in lengths for name in names]

    async def main(system: System) -> list[dict[str, Any]]:
        async with client_of(system) as client:
            return await asyncio.gather(*(ask(client, body(name, prompt)) for name, prompt in cases))

    with adapters.served(tmp_path, names[1:], *ranks) as system:
        answers = asyncio.run(main(system))
        assert system.metric("kvrelay_attempts_total", mode="relayed") == len(cases)
    for (name, prompt), answer in zip(cases, answers, strict=True):
        adapters.check(name, prompt, tokens_of(answer))
        assert cached(answer) == 0  # others have the same prompt under other adapters


def test_streams_are_undisturbed_while_adapters_are_loaded_and_unloaded(adapters: Adapters, tmp_path: Path) -> None:
    steady = ["base", "ad0", "ad1", "ad2"]
    changing = ["ad3", "ad4", "ad5"]
    rounds = 3

    async def main(system: System) -> tuple[dict[str, list[list[int]]], dict[str, list[int]]]:
        is_over = False
        streams: dict[str, list[list[int]]] = {name: [] for name in steady}
        last: dict[str, list[int]] = {}

        async def keep_streaming(name: str) -> None:
            while not is_over:
                streams[name].append(await stream(client, body(name, prompt_of(70), 100), []))

        async with client_of(system) as client:
            tasks = [asyncio.create_task(keep_streaming(name)) for name in steady]
            for number in range(rounds):
                for name in changing:
                    await change(client, "load", name, adapters.files[name])
                    tokens = last[f"{name}/{number}"] = []
                    answer = asyncio.create_task(stream(client, body(name, prompt_of(40, number), 60), tokens))
                    while not tokens and not answer.done():
                        await asyncio.sleep(0.002)
                    await change(client, "unload", name)  # the request that runs keeps its weights
                    assert len(await answer) == 60
            is_over = True
            await asyncio.gather(*tasks)
            gone = await client.post("/v1/completions", json=body("ad3", [5]))
            assert gone.status_code == 404, gone.text
        return streams, last

    with adapters.served(tmp_path, steady[1:], "--max-loras", "4") as system:
        streams, last = asyncio.run(main(system))
    for name, answers in streams.items():
        assert answers
        for tokens in answers:
            adapters.check(name, prompt_of(70), tokens)
    for key, tokens in last.items():
        name, _, number = key.partition("/")
        adapters.check(name, prompt_of(40, int(number)), tokens)


def test_a_thousand_prompts_hit_no_prefix_of_another_adapter(adapters: Adapters, tmp_path: Path) -> None:
    names = [f"ad{number}" for number in range(NUM_ADAPTERS)]
    cases = [(name, prompt_of(33, seed)) for seed in range(125) for name in names]

    async def main(system: System) -> list[dict[str, Any]]:
        async with client_of(system) as client:
            first = [await asyncio.gather(*(ask(client, body(*case, 1)) for case in part)) for part in batches]
            again = await ask(client, body(*cases[-1], 1))
            return [*(answer for part in first for answer in part), again]

    batches = [cases[begin : begin + 100] for begin in range(0, len(cases), 100)]
    with adapters.served(tmp_path, names) as system:
        *answers, again = asyncio.run(main(system))
    assert len(answers) == 1000
    assert {cached(answer) for answer in answers} == {0}
    assert cached(again) == 32
    for (name, prompt), answer in list(zip(cases, answers, strict=True))[::25]:
        adapters.check(name, prompt, tokens_of(answer))


def test_a_reloaded_name_with_other_weights_gets_no_prefix_hit(adapters: Adapters, tmp_path: Path) -> None:
    other = adapters.add("other", rank=6, seed=99)
    prompt = prompt_of(200)

    async def main(system: System) -> list[dict[str, Any]]:
        async with client_of(system) as client:
            await change(client, "load", "ad0", adapters.files["ad0"])
            first = [await ask(client, body("ad0", prompt)) for _ in range(2)]
            await change(client, "unload", "ad0")
            await change(client, "load", "ad0", other)
            second = [await ask(client, body("ad0", prompt)) for _ in range(2)]
            return first + second

    with adapters.served(tmp_path, ["ad1"]) as system:
        answers = asyncio.run(main(system))
    assert [cached(answer) for answer in answers] == [0, 192, 0, 192]
    for name, answer in zip(("ad0", "ad0", "other", "other"), answers, strict=True):
        adapters.check(name, prompt, tokens_of(answer))


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_streams_of_eight_adapters_go_on_after_kill_9(role: str, adapters: Adapters, tmp_path: Path) -> None:
    names = [f"ad{number}" for number in range(NUM_ADAPTERS)]
    prompt = prompt_of(120)

    async def main(system: System) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in names]
        async with client_of(system) as client:
            tasks = [
                asyncio.create_task(stream(client, body(name, prompt, 300), tokens))
                for name, tokens in zip(names, answers, strict=True)
            ]
            enough = 10 if role == "decode" else 0
            while not all(len(tokens) >= enough for tokens in answers) and not any(task.done() for task in tasks):
                await asyncio.sleep(0.005)
            system.kill(role)
            await asyncio.gather(*tasks)
        return answers

    with adapters.served(tmp_path, names) as system:
        answers = asyncio.run(main(system))
        system.wait_usable()
    for name, tokens in zip(names, answers, strict=True):
        assert len(tokens) == 300
        adapters.check(name, prompt, tokens)


def test_adapters_that_were_loaded_while_nodes_ran_outlive_them(adapters: Adapters, tmp_path: Path) -> None:
    prompt = prompt_of(50)

    def answer(system: System) -> httpx.Response:
        return httpx.post(f"{system.url}/v1/completions", json=body("ad1", prompt), timeout=60)

    def kill_both(system: System) -> None:
        before = {node["incarnation"] for node in system.admin("nodes")["nodes"]}

        def are_back() -> bool:
            nodes = [node for node in system.admin("nodes")["nodes"] if node["incarnation"] not in before]
            return len(nodes) == 2 and all({"ad0", "ad2"} <= set(node["adapters"]) for node in nodes)

        for role in ("prefill", "decode"):
            system.kill(role)
        wait_until(are_back, 60, "both nodes are back with their adapters")

    with adapters.served(tmp_path, ["ad0"]) as system:
        for name in ("ad1", "ad2"):
            system.admin("lora", "load", name, str(adapters.files[name]))
        assert answer(system).status_code == 200, "the router knew it when the command was done"
        kill_both(system)
        adapters.check("ad1", prompt, tokens_of(answer(system).json()))
        system.admin("lora", "unload", "ad1")
        kill_both(system)
        assert answer(system).status_code == 404
