"""Ranks share fate: kill -9 or SIGSTOP of any rank ends its node, which comes back; streams end right or clearly."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from support.oracle import greedy, make_tiny
from support.system import System, ranks_of, running_system, wait_until

MODEL = "qwen3"
PROMPT = list(range(3, 90))
LEASE_S = 3.0
NOTICED_S = 3.0
"""Beyond the lease, on a busy machine."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, System]]:
    folder = tmp_path_factory.mktemp("ranks")
    model = make_tiny(MODEL, folder / MODEL)
    args = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "300", "--local-prefill-tokens", "0")
    with running_system(folder, *args, "--decode-tp", "2", "--decode-pp", "2", "--start-timeout-s", "240") as system:
        system.wait_usable(timeout_s=240)
        yield model, system


def all_ranks(system: System) -> list[int]:
    """Pids of the decode node's ranks, the leader first."""
    leader = system.process("decode")["pid"]
    return [leader, *ranks_of(leader)]


def ask(system: System, tokens: int, timeout_s: float = 60.0) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{system.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=timeout_s)


def decode_lines(system: System) -> list[str]:
    return [line for line in system.log_file.read_text(errors="replace").splitlines() if "decode-0" in line]


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (0, signal.SIGKILL),
        (3, signal.SIGKILL),
        (3, signal.SIGSTOP),
        *(pytest.param(rank, signal.SIGKILL, marks=pytest.mark.thorough) for rank in (1, 2)),
        *(pytest.param(rank, signal.SIGSTOP, marks=pytest.mark.thorough) for rank in (0, 1, 2)),
    ],
)
def test_any_ranks_end_is_the_nodes_and_the_node_comes_back(
    served: tuple[Path, System], rank: int, number: signal.Signals
) -> None:
    model, system = served
    system.wait_usable(timeout_s=120)
    before = all_ranks(system)
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
            told = len(decode_lines(system))
            os.kill(before[rank], number)
            if rank > 0:
                # Its leader says so, or a rank that waited for it in the middle of a step.
                named = re.compile(rf"the node ends: .*\brank {rank} ")
                wait_until(
                    lambda: any(named.search(line) for line in decode_lines(system)[told:]),
                    NOTICED_S + (LEASE_S if number == signal.SIGSTOP else 0.0),
                    f"the log names rank {rank}",
                )
            rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]", "the stream ends, with tokens or with an error"

    def gone(pids: list[int]) -> bool:
        return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)

    if (rank, number) == (0, signal.SIGSTOP):
        # Its ranks end, and it ends when it finds them gone, unless `kvrelay up` was sooner.
        wait_until(lambda: gone(before[1:]), LEASE_S + NOTICED_S, "the ranks of a silent leader are gone")
        with contextlib.suppress(ProcessLookupError):
            os.kill(before[0], signal.SIGCONT)
    wait_until(lambda: gone(before), 30, "all ranks of the old incarnation are gone")
    wait_until(lambda: system.is_restarted("decode", before[0]), 60, "the node is restarted")
    if rank > 0:
        lines_since = [line for line in decode_lines(system)[told:] if not line.startswith("router")]
        end = next(i for i, line in enumerate(lines_since) if "decode-0 ended (" in line)
        assert f"rank {rank} " in lines_since[end - 1], "the last line names the rank"
    system.wait_usable(timeout_s=120)
    answer = ask(system, 20)
    assert answer.json()["choices"][0]["token_ids"] == greedy(model, PROMPT, 20).tokens
    system.wait_whole()
