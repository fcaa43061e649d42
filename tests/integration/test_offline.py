"""Offline use against the same model behind HTTP: `LLM`, `kvrelay batch`, `kvrelay chat`, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.system import System, running_system, wait_until

from kvrelay import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Hello, my name is", "One day a", "I like"]
PARAMS = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=0.9, top_p=0.95, seed=7, stop=".")]
SAMPLED = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=24)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
REQUESTS = 40


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("offline"), "--kv-memory-gb", "0.1") as system:
        system.wait_usable()
        yield system


def over_http(system: System, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{system.url}{path}", json={"return_token_ids": True, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def offline(llm: LLM) -> list[tuple[str, list[int], str | None]]:
    outputs = [output for params in PARAMS for output in llm.generate(PROMPTS, params)] + llm.chat(QUESTION, PARAMS[0])
    outputs += llm.generate(PROMPTS[0], SAMPLED)
    answers = [answer for output in outputs for answer in output.outputs]
    return [(answer.text, answer.token_ids, answer.finish_reason) for answer in answers]


def scored_tokens(llm: LLM) -> tuple[list[tuple[int, int | None]], list[float]]:
    """(token, rank) of all answers and prompts, with their log-probabilities."""
    outputs = llm.generate(
        PROMPTS, SamplingParams(temperature=1, seed=2, max_tokens=8, n=2, logprobs=2, prompt_logprobs=2)
    )
    rows = [row for output in outputs for row in output.prompt_logprobs or () if row is not None]
    rows += [row for output in outputs for answer in output.outputs for row in answer.logprobs or ()]
    found = [(token, each.rank, each.logprob) for row in rows for token, each in row.items()]
    return [(token, rank) for token, rank, _ in found], [logprob for *_, logprob in found]


def test_one_process_returns_the_tokens_of_the_http_api(system: System) -> None:
    choices = [
        choice
        for prompt, params in [*((prompt, params) for params in PARAMS for prompt in PROMPTS), (PROMPTS[0], SAMPLED)]
        for choice in over_http(system, "/v1/completions", {"prompt": prompt, **params.completion_fields()})
    ]
    expected = [(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in choices]
    [chat] = over_http(system, "/v1/chat/completions", {"messages": QUESTION, **PARAMS[0].chat_fields()})
    answer = chat["message"]["content"], chat["token_ids"], chat["finish_reason"]
    expected.insert(len(PROMPTS) * len(PARAMS), answer)
    with LLM("demo", kv_memory_gb=0.1) as llm:
        assert offline(llm) == expected


def write_batch(file: Path) -> None:
    lines = [
        {
            "custom_id": f"id-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [5 + index], "max_tokens": 60, "temperature": 0, "ignore_eos": True},
        }
        for index in range(REQUESTS)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def batch_command(folder: Path, *args: str) -> list[str]:
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return [sys.executable, "-m", "kvrelay", "batch", *files, *args]


def results(folder: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in (folder / "out.jsonl").read_text().splitlines()]


def test_a_killed_batch_goes_on_without_doing_anything_twice(system: System, tmp_path: Path) -> None:
    write_batch(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    command = batch_command(tmp_path, "--url", system.url, "--concurrency", "4")
    first = subprocess.Popen(command)
    try:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, 60, "some results")
    finally:
        first.kill()
        first.wait()
    before = results(tmp_path)
    assert 5 <= len(before) < REQUESTS
    out.write_bytes(out.read_bytes() + b'{"id": "batch_req_1", "cus')  # as if killed within a write
    system.wait_whole()
    answered = system.metric("vllm:request_success_total")
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    after = results(tmp_path)
    assert after[: len(before)] == before
    assert sorted(after) == sorted(f"id-{index}" for index in range(REQUESTS))
    assert system.metric("vllm:request_success_total") - answered == REQUESTS - len(before)


@pytest.mark.thorough
def test_a_chat_from_a_pipe_is_answered(system: System) -> None:
    command = [sys.executable, "-m", "kvrelay", "chat", "--url", system.url, "--temperature", "0"]
    result = subprocess.run(
        command, input="What is the capital of France?\n", capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "The capital of France is Paris.\n")


@pytest.mark.thorough
def test_a_local_cluster_returns_the_tokens_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with LLM("demo", kv_memory_gb=0.1) as llm:
        expected = offline(llm)
        tokens, logprobs = scored_tokens(llm)
    with LLM("demo", prefill=1, decode=1, kv_memory_gb=0.1) as llm:
        supervisor: Any = llm._engine._cluster._process  # type: ignore[attr-defined]
        services = psutil.Process(supervisor.pid).children(recursive=True)
        assert offline(llm) == expected
        # PyTorch's sum over the vocabulary, used without native kernels, depends on the batch in the last bits.
        assert scored_tokens(llm) == (tokens, pytest.approx(logprobs, abs=1e-5))
    assert len(services) >= 4
    assert not [service for service in services if service.is_running()]


@pytest.mark.thorough
def test_a_batch_with_its_own_cluster_takes_it_along_when_killed(tmp_path: Path) -> None:
    write_batch(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "KVRELAY_KV_MEMORY_GB": "0.1"}
    command = batch_command(tmp_path, "--model", "demo", "--concurrency", "4")
    first = subprocess.Popen(command, env=environ)
    try:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, 120, "some results")
        services = psutil.Process(first.pid).children(recursive=True)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    wait_until(lambda: not any(service.is_running() for service in services), 30, "the end of the cluster")
    before = results(tmp_path)
    assert subprocess.run(command, env=environ, timeout=200).returncode == 0
    assert results(tmp_path)[: len(before)] == before
    assert sorted(results(tmp_path)) == sorted(f"id-{index}" for index in range(REQUESTS))


@pytest.mark.thorough
def test_serve_starts_the_named_model(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids.json"
    command = [sys.executable, "-m", "kvrelay", "serve", "demo", "--port", "0", "--kv-memory-gb", "0.1"]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    served = subprocess.Popen([*command, "--pid-file", str(pid_file)], env=environ, stdout=subprocess.DEVNULL)
    try:
        wait_until(pid_file.exists, 120, "the cluster")
        [router] = [entry for entry in json.loads(pid_file.read_text()) if entry["role"] == "router"]
        models = httpx.get(f"{router['address']}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["demo"]
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 0
