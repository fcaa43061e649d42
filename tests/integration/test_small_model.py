"""A real small model, one GGUF file: its answers over HTTP are those of transformers, also when a node dies meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.oracle import first_difference, greedy
from support.real_small_model import fetched, prompt_ids, to_transformers
from support.system import System, running_system, wait_until

from scripts.small_model import NAME

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers.",
    "Wer war Goethe?",
    "Summarise this text: " + "The quick brown fox jumps over the lazy dog. 123 times it ran from 4 hunters. " * 36,
)
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights for transformers, in float32."""
    return to_transformers(fetched(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def system(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    nodes = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--local-prefill-tokens", "0")
    with running_system(tmp_path_factory.mktemp("up"), "--model", str(fetched()), *nodes) as running:
        running.wait_usable(2, 2)
        yield running


def body(question: str, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    greedy_options = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return {"model": NAME, "messages": messages, **greedy_options, **more}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question[:12])
def test_answers_are_those_of_transformers(system: System, plain: Path, question: str) -> None:
    ids = prompt_ids(plain, question)
    answer = httpx.post(f"{system.url}/v1/chat/completions", json=body(question), timeout=300.0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["prompt_token_ids"] == ids
    assert answer.headers["x-kvrelay-prefill-mode"] == "relayed"
    (choice,) = answer.json()["choices"]
    assert first_difference(greedy(plain, ids, NEW_TOKENS), choice["token_ids"]) is None
    system.wait_whole()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stream_goes_on_with_the_same_tokens_when_a_node_dies(system: System, plain: Path, role: str) -> None:
    question = QUESTIONS[2]
    expected = greedy(plain, prompt_ids(plain, question), NEW_TOKENS)
    tokens: list[int] = []
    killed = 0
    url = f"{system.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(question, stream=True), timeout=300.0) as answer:
        node = answer.headers[f"x-kvrelay-{role}-node"]
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) >= 5 and not killed:
                killed = system.kill(role, int(node.rpartition("-")[2]))
    assert killed
    assert first_difference(expected, tokens) is None
    wait_until(lambda: killed not in [each["pid"] for each in system.processes()], 60, "it is restarted")
    system.wait_usable(2, 2)
    system.wait_whole()
