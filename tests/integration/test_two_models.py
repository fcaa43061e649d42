"""Two models in one cluster, as docs/deployment.md says: real processes, each answer by its own model's nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import warm_start
from support.oracle import first_difference, greedy, make_tiny
from support.redis_server import RedisServer
from support.system import System, running_system, wait_until

NEW_TOKENS = 24
PROMPT = [5 + index % 90 for index in range(100)]


@dataclass
class TwoModels:
    """`kvrelay up` with the model `llama`, and a prefill and a decode node of `qwen3` beside it."""

    system: System
    folders: dict[str, Path]
    others: dict[str, warm_start.Process]
    """The nodes of `qwen3` by role."""

    def ask(self, model: str, count: int = NEW_TOKENS) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.system.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)

    def check(self, model: str) -> httpx.Response:
        """The model's own greedy tokens."""
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        assert said["model"] == model
        expected = greedy(self.folders[model], PROMPT, NEW_TOKENS)
        assert first_difference(expected, said["choices"][0]["token_ids"]) is None
        return answer

    def names(self) -> list[str]:
        return [card["id"] for card in httpx.get(f"{self.system.url}/v1/models").json()["data"]]


@contextlib.contextmanager
def two_models(folder: Path) -> Iterator[TwoModels]:
    folders = {name: make_tiny(name, folder / name) for name in ("llama", "qwen3")}
    options = ["--dtype", "float32", "--kv-blocks", "200"]
    with RedisServer() as redis, contextlib.ExitStack() as stack:
        options += ["--redis-url", redis.url]
        up = [*options, "--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0"]
        system = stack.enter_context(running_system(folder, "--model", str(folders["llama"]), *up))
        others: dict[str, warm_start.Process] = {}
        for role in ("prefill", "decode"):
            command = [sys.executable, "-m", "kvrelay", role, "--node-id", f"qwen-{role}", *options]
            log = stack.enter_context((folder / f"{role}.log").open("wb"))
            others[role] = warm_start.start([*command, "--model", str(folders["qwen3"])], log, os.environ)
        try:
            wait_until(
                lambda: system.health().get("decode") == 2 and system.health().get("prefill") == 2, 90, "4 nodes"
            )
            both = TwoModels(system, folders, others)
            wait_until(lambda: sorted(both.names()) == ["llama", "qwen3"], 30, "both models are listed")
            yield both
            system.wait_whole()
        finally:
            for process in others.values():
                process.send_signal(signal.SIGTERM)
            for process in others.values():
                process.wait(30)


def test_each_model_answers_with_its_own_tokens_on_its_own_nodes(tmp_path: Path) -> None:
    with two_models(tmp_path) as both:
        for model, ours in (("qwen3", True), ("llama", False), ("qwen3", True)):
            headers = both.check(model).headers
            assert headers["x-kvrelay-prefill-mode"] == "relayed"
            for leg in ("prefill", "decode"):
                assert (headers[f"x-kvrelay-{leg}-node"] == f"qwen-{leg}") is ours, headers
        unnamed = httpx.post(f"{both.system.url}/v1/completions", json={"prompt": "hi"})
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")


@pytest.mark.thorough
def test_a_model_whose_decode_node_is_killed_leaves_the_other_alone(tmp_path: Path) -> None:
    with two_models(tmp_path) as both:
        both.check("qwen3")
        os.kill(both.others["decode"].pid, signal.SIGKILL)
        wait_until(lambda: both.system.health().get("decode") == 1, 30, "the loss is seen")
        for _ in range(3):
            both.check("llama")
            assert both.ask("qwen3").status_code == 503  # known, without a decode node: no 404, and no node of llama
        os.kill(both.others["prefill"].pid, signal.SIGKILL)
        wait_until(lambda: both.system.health().get("prefill") == 1, 30, "the loss is seen")
        both.check("llama")
        assert both.ask("qwen3").status_code == 503
