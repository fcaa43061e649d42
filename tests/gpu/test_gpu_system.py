"""A whole system with both nodes on one GPU. What it answers is tested by the suites that `gpu-check` runs beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gpu_suite import DEVICE, IS_GPU
from support.system import System, running_system

from scripts.demo_model.samples import SAMPLES


@pytest.fixture(scope="module", params=["auto", "fp8"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("GPU")
    arguments = (
        "--model",
        "demo",
        "--device",
        DEVICE,
        "--kv-cache-dtype",
        request.param,
        "--local-prefill-tokens",
        "0",
    )
    with running_system(folder, *arguments) as system:
        system.wait_usable()
        yield system
        system.wait_whole()


def ask(system: System, prompt: str) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8}
    answer = httpx.post(f"{system.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_trained_model_answers_over_a_relay_that_stays_on_the_gpu(served: System) -> None:
    right = 0
    prompts = [sample for sample in SAMPLES if sample.text]
    for sample in prompts:
        answer = ask(served, sample.text)
        assert answer.headers["x-kvrelay-prefill-mode"] == "relayed"
        right += answer.json()["choices"][0]["text"].startswith(sample.expected)
    assert right >= len(prompts) - 1
    if IS_GPU:
        assert served.metric("kvrelay_relay_bytes_total", transport="cuda_ipc") > 0
        assert served.metric("kvrelay_relay_bytes_total") == served.metric(
            "kvrelay_relay_bytes_total", transport="cuda_ipc"
        )


def test_both_nodes_fit_side_by_side_and_say_how_many_blocks_they_have(served: System) -> None:
    nodes: list[dict[str, Any]] = served.admin("nodes")["nodes"]
    assert sorted(node["role"] for node in nodes) == ["decode", "prefill"]
    assert all(node["load"]["kv_blocks_total"] > 100 for node in nodes)
