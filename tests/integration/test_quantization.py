"""Quantized weights through real nodes: they relay to nodes that quantize alike, and to no others."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support import warm_start
from support.system import START_TIMEOUT_S, System, running_system, wait_until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("int4")
    arguments = ("--model", "demo", "--quantization", "int4", "--kv-blocks", "200", "--local-prefill-tokens", "0")
    with running_system(folder, *arguments) as system:
        system.wait_usable()
        yield system
        system.wait_whole()


def ask(system: System, prompt: str) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 6}
    answer = httpx.post(f"{system.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(
    ("prompt", "answer"), [("The capital of Italy is", " Rome."), ("The opposite of hot is", " cold.")]
)
def test_a_trained_model_answers_as_ever_on_int4_weights(served: System, prompt: str, answer: str) -> None:
    response = ask(served, prompt)
    assert response.headers["x-kvrelay-prefill-mode"] == "relayed"
    assert response.json()["choices"][0]["text"].startswith(answer)


def test_a_decode_node_that_does_not_quantize_gets_no_requests_and_the_log_says_so(
    served: System, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvrelay", "decode", "--model", "demo", "--kv-blocks", "100"]
    command += ["--redis-url", served.process("redis")["address"], "--node-id", "other"]
    log = tmp_path / "other.log"
    with log.open("wb") as out:
        other = warm_start.start(command, out, os.environ)
    try:

        def is_told() -> bool:
            lines = [line for line in served.log_file.read_text().splitlines() if "other is ignored" in line]
            return any("-int4'" in line for line in lines)

        wait_until(is_told, START_TIMEOUT_S, f"a line about the node; its log:\n{log.read_text()}")
        assert served.health().get("decode") == 1
        assert "other is ignored" in served.health()["ignored_nodes"][0]
        for _ in range(3):
            assert ask(served, "The capital of Spain is").headers["x-kvrelay-decode-node"] != "other"
    finally:
        other.terminate()
        assert other.wait(30) == 0
        wait_until(lambda: not served.health().get("ignored_nodes"), 30.0, "the node is gone")
