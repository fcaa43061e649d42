"""n = 8 of a long prompt: one relay, the memory of one prompt and eight tails, and no sample changed by a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from support.system import System, running_system

SAMPLES, PROMPT, NEW_TOKENS = 8, 1984, 56


@dataclass
class Answer:
    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SAMPLES)])
    served: list[dict[str, Any]] = field(default_factory=lambda: [{} for _ in range(SAMPLES)])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("samples"), "--decode", "2", "--local-prefill-tokens", "32") as running:
        running.wait_usable(1, 2)
        yield running


def ask(system: System, salt: str, kill: str = "") -> Answer:
    """The samples' tokens. `kill`: the role of the node that dies once every sample has ten tokens."""
    body = {
        "model": "demo",
        "prompt": [3 + (7 * at) % 250 for at in range(PROMPT)],
        "n": SAMPLES,
        "max_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "ignore_eos": True,
        "seed": 11,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    found = Answer()
    with httpx.stream("POST", f"{system.url}/v1/completions", json=body, timeout=90.0) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            found.usage = event["usage"] or found.usage
            for choice in event["choices"]:
                found.tokens[choice["index"]] += choice.get("token_ids", [])
                if choice["finish_reason"]:
                    found.served[choice["index"]] = event["kvrelay"]
            if kill and min(map(len, found.tokens)) >= 10:
                node = answer.headers[f"x-kvrelay-{kill}-node"]
                system.kill(kill, int(node.rpartition("-")[2]))
                kill = ""
    assert not kill, "every sample ended before the kill"
    return found


def test_the_samples_of_a_prompt_cost_one_relay_and_share_its_blocks(system: System) -> None:
    found = ask(system, "a")
    assert [len(tokens) for tokens in found.tokens] == [NEW_TOKENS] * SAMPLES
    assert len({tuple(tokens) for tokens in found.tokens}) == SAMPLES
    assert found.usage["prompt_tokens"] == PROMPT
    assert found.usage["completion_tokens"] == SAMPLES * NEW_TOKENS
    first, *others = found.served
    assert first["prefill_mode"] == "relayed"
    assert first["relayed_bytes"] > 0
    for other in others:
        assert other["prefill_mode"] == "local"
        assert other["decode_node"] == first["decode_node"]
        assert other["relayed_bytes"] == 0
        assert other["decode_hit_tokens"] == PROMPT - 1, "the last block was not copied"
    system.wait_whole()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_node_changes_no_sample(system: System, role: str) -> None:
    system.wait_usable(1, 2)
    undisturbed, disturbed = ask(system, f"{role}-b"), ask(system, f"{role}-c", kill=role)
    assert disturbed.tokens == undisturbed.tokens
    attempts = [served["attempt"] for served in disturbed.served]
    assert attempts == ([2] * SAMPLES if role == "decode" else [1] * SAMPLES)
    if role == "decode":
        assert sum(served["relayed_bytes"] > 0 for served in disturbed.served) <= 2
    system.wait_usable(1, 2)
    system.wait_whole()
