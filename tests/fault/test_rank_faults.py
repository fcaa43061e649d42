"""Ranks share fate: kill -9 or SIGSTOP of any rank ends its node, which comes back; streams end right or clearly."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from oracle import greedy, make_tiny
from system import System, running_system, wait_until

MODEL = "qwen3"
PROMPT = list(range(3, 90))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, System]]:
    folder = tmp_path_factory.mktemp("ranks")
    model = make_tiny(MODEL, folder / MODEL)
    args = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "300", "--local-prefill-tokens", "0")
    with running_system(folder, *args, "--decode-tp", "2", "--decode-pp", "2", "--start-timeout-s", "240") as system:
        system.wait_usable(timeout_s=240)
        yield model, system


def ranks_of(system: System) -> list[int]:
    """Pids of the decode node's ranks, the leader first."""
    leader = system.process("decode")["pid"]
    others = [
        (child.cmdline()[child.cmdline().index("--rank") + 1], child.pid)
        for child in psutil.Process(leader).children()
        if "--rank" in child.cmdline()
    ]
    return [leader, *(pid for _, pid in sorted(others))]


def ask(system: System, tokens: int, timeout_s: float = 60.0) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{system.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=timeout_s)


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGKILL), (3, signal.SIGKILL), (3, signal.SIGSTOP)],
)
def test_any_ranks_end_is_the_nodes_and_the_node_comes_back(
    served: tuple[Path, System], rank: int, number: signal.Signals
) -> None:
    model, system = served
    system.wait_usable(timeout_s=120)
    before = ranks_of(system)
    assert len(before) == 4
    with httpx.Client(timeout=120.0) as client:
        body = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": 400,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        with client.stream("POST", f"{system.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(10):
                next(lines)
            os.kill(before[rank], number)
            rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]", "the stream ends, with tokens or with an error"

    def gone() -> bool:
        return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in before)

    wait_until(gone, 30, "all ranks of the old incarnation are gone")
    wait_until(lambda: system.is_restarted("decode", before[0]), 60, "the node is restarted")
    system.wait_usable(timeout_s=120)
    answer = ask(system, 20)
    assert answer.json()["choices"][0]["token_ids"] == greedy(model, PROMPT, 20).tokens
    system.wait_whole()
