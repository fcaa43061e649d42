"""A model with a head (MTP, EAGLE-3) through router, prefill node, relay and decode node: the head's KV and its hidden rows arrive with the
prompt's.

The layer is always right if it reads the right rows (`support.draft_heads.always_right`): one wrong guess is a failure.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.test_exactness import ask_all, body
from support import warm_start
from support.draft_heads import always_right, make_mtp, small_vocabulary
from support.eagle_heads import make_eagle
from support.system import START_TIMEOUT_S, System, running_system, wait_until

NEW_TOKENS = 40


@dataclass(frozen=True)
class Case:
    """A system: its model, its ranks, its KV."""

    model: str
    prefill_tp: int = 1
    decode_tp: int = 1
    kv_cache_dtype: str = "auto"
    method: str = "mtp"


CASES = [
    Case("glm4-moe"),
    Case("deepseek-v3", decode_tp=2),
    Case("glm4-moe", method="eagle3"),
    pytest.param(Case("glm4-moe", prefill_tp=2, kv_cache_dtype="fp8"), marks=pytest.mark.thorough),
    pytest.param(Case("deepseek-v3", prefill_tp=2, decode_tp=2), marks=pytest.mark.thorough),
    pytest.param(Case("glm4-moe", prefill_tp=2, decode_tp=2, method="eagle3"), marks=pytest.mark.thorough),
]


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case.model}-{case.method}-{case.prefill_tp}-{case.decode_tp}"
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Case, Path, System]]:
    case: Case = request.param
    folder = tmp_path_factory.mktemp("mtp")
    model = make_mtp(small_vocabulary(case.model), folder / "model", always_right(6, by_hidden=True))
    method, most = "mtp", 4
    if case.method == "eagle3":  # which knows only the first guess
        method, most = f"eagle:{make_eagle(model, folder / 'head', by_hidden=True)}", 1
    config = folder / "kvrelay.toml"
    config.write_text("[prefill]\nmax_num_batched_tokens = 48\n")  # prompts are computed in chunks
    with running_system(
        folder,
        *("--model", str(model), "--dtype", "float32", "--kv-blocks", "300", "--local-prefill-tokens", "0"),
        *("--config", str(config), "--speculate", method, "--speculate-tokens", str(most), "--start-timeout-s", "240"),
        *("--prefill-tp", str(case.prefill_tp), "--decode-tp", str(case.decode_tp)),
        *("--kv-cache-dtype", case.kv_cache_dtype),
    ) as system:
        system.wait_usable(timeout_s=240)
        yield case, model, system
        system.wait_whole()


def guesses(system: System, method: str) -> tuple[float, float]:
    """(drafts, those that were right) so far."""
    drafted, accepted = (
        system.metric(f"vllm:spec_decode_num_{kind}_tokens_total", method=method) for kind in ("draft", "accepted")
    )
    return drafted, accepted


def test_every_guess_after_a_relayed_prompt_is_right(served: tuple[Case, Path, System]) -> None:
    case, model, system = served
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 60) for _ in range(length)] for length in (1, 15, 16, 17, 100)]
    prompts += [[*prompts[-1][:64], 5, 6, 7], prompts[-1][:48]]  # prefixes that are there already
    bodies = [body(model, prompt, max_tokens=NEW_TOKENS, logprobs=None) for prompt in prompts]
    asyncio.run(ask_all(system.url, bodies))
    answers = asyncio.run(ask_all(system.url, bodies))
    following: dict[int, int] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [prompt[-1], *answer["choices"][0]["token_ids"]]
        assert len(tokens) == NEW_TOKENS + 1
        for before, after in itertools.pairwise(tokens):
            assert following.setdefault(before, after) == after, "each token follows from the one before it"
    wait_until(lambda: guesses(system, case.method)[0] > 0, 20.0, "it guesses, unless two slow ranks make that not pay")
    wait_until(
        lambda: len(set(guesses(system, case.method))) == 1,
        10.0,
        "all counts have been reported and every guess was right",
    )


def test_a_node_without_the_head_gets_no_requests(served: tuple[Case, Path, System], tmp_path: Path) -> None:
    _, model, system = served
    command = [
        sys.executable,
        "-m",
        "kvrelay",
        "decode",
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--kv-blocks",
        "100",
    ]
    command += ["--redis-url", system.process("redis")["address"], "--node-id", "headless"]
    log = tmp_path / "other.log"
    with log.open("wb") as out:
        other = warm_start.start(command, out, os.environ)
    try:
        ignored = wait_until(lambda: system.health().get("ignored_nodes"), START_TIMEOUT_S, "it is seen")
        assert "headless" in str(ignored)
    finally:
        other.terminate()
        assert other.wait(30) == 0
        wait_until(lambda: not system.health().get("ignored_nodes"), 30.0, "the node is gone")
