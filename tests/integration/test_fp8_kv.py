"""FP8 KV through real nodes: the prefill node's e4m3 blocks reach the decode node, which goes on from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support import warm_start
from support.system import START_TIMEOUT_S, System, running_system, wait_until

from common.model.config import load_model_config
from common.model.description import multi_head
from common.model.hub import DEMO_MODEL_PATH

SLOTS = 16


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("fp8")
    arguments = ("--model", "demo", "--kv-cache-dtype", "fp8", "--kv-blocks", "200", "--local-prefill-tokens", "0")
    with running_system(folder, *arguments) as system:
        system.wait_usable()
        yield system
        system.wait_whole()


def ask(system: System, prompt: str, max_tokens: int) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
    answer = httpx.post(f"{system.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("The capital of Italy is", " Rome."), ("1, 2, 3,", " 4, 5, 6, 7"), ("Hello, my name is", " Ana")],
)
def test_a_trained_model_answers_as_ever_over_relayed_fp8_kv(served: System, prompt: str, answer: str) -> None:
    response = ask(served, prompt, 12)
    assert response.headers["x-kvrelay-prefill-mode"] == "relayed"
    assert response.json()["choices"][0]["text"].startswith(answer)


def test_a_relay_moves_one_byte_for_each_number_half_of_what_bf16_takes(served: System) -> None:
    config = load_model_config(DEMO_MODEL_PATH)
    heads = multi_head(config.layers[0])
    response = ask(served, " one two three four five six seven eight" * 12, 2)
    blocks = -(-response.json()["usage"]["prompt_tokens"] // SLOTS)
    expected = blocks * config.num_layers * 2 * SLOTS * heads.num_kv_heads * heads.head_dim
    assert blocks > 3
    assert int(response.headers["x-kvrelay-relayed-bytes"]) == expected


def test_a_decode_node_with_another_kv_type_gets_no_requests_and_the_log_names_both(
    served: System, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvrelay", "decode", "--model", "demo", "--kv-cache-dtype", "bfloat16"]
    command += ["--kv-blocks", "100", "--redis-url", served.process("redis")["address"], "--node-id", "other"]
    log = tmp_path / "other.log"
    with log.open("wb") as out:
        other = warm_start.start(command, out, os.environ)
    try:
        said = "its KV's dtype is 'bfloat16', not 'float8_e4m3'"
        wait_until(lambda: said in served.log_file.read_text(), START_TIMEOUT_S, f"{said}; its log:\n{log.read_text()}")
        for _ in range(3):
            assert ask(served, "The capital of Spain is", 4).headers["x-kvrelay-decode-node"] != "other"
    finally:
        other.terminate()
        assert other.wait(30) == 0
        wait_until(lambda: not served.health().get("ignored_nodes"), 30.0, "the node is gone")
