"""Nodes whose ranks each hold the KV of their own sequences and send rows to the ranks of their experts: greedy float32 tokens equal
those of `transformers`.

Real nodes of several processes each. One case covers windows, sinks and both sides; the others run in `make test-all`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.test_context_parallel import check_a_killed_rank, check_answers, make_prompts
from integration.test_parallel_matrix import make_prompts as matrix_prompts
from support.lora_files import merge, write_adapter
from support.oracle import TINY, greedy, make_tiny, prompt_logprobs
from support.system import System, running_system, wait_until

from common.model.config import load_model_config
from common.model.kv_spec import kv_spec

NEW_TOKENS = 40
PREFILL_CHUNK = 96
PREFILL, DECODE = "--prefill-data-parallel-attention", "--decode-data-parallel-attention"

COVERING = [("gpt-oss", f"--prefill-tp 2 {PREFILL} --decode-tp 4 {DECODE} --async-scheduling")]
THOROUGH = [
    ("qwen3-moe", f"--decode-tp 2 {DECODE} --rebalance-experts 1.05 --redundant-experts 2"),
    ("qwen3-moe", f"--prefill-context-parallel 2 --decode-tp 2 {DECODE} --speculate suffix"),
    ("mixtral", f"--prefill-tp 2 --decode-tp 2 {DECODE} --decode-pp 2"),
    ("mixtral", f"--prefill-tp 2 {PREFILL} --decode-context-parallel 2"),
    ("gpt-oss", f"--prefill-tp 2 --decode-tp 2 {DECODE}"),
    ("deepseek-v3", f"--prefill-tp 2 --decode-tp 4 {DECODE}"),
    ("deepseek-v3", f"--prefill-tp 2 {PREFILL} --decode-tp 2 --decode-pp 2"),
    ("deepseek-v2", f"--prefill-tp 2 {PREFILL} --decode-tp 2 {DECODE} --decode-pp 2"),
    ("granite-moe", f"--decode-tp 2 {DECODE} --decode-pp 2"),
    ("glm4-moe", f"--prefill-tp 4 {PREFILL} --decode-tp 2 {DECODE}"),
]
CASES = [*COVERING, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)]


@contextmanager
def cluster(folder: Path, model: Path, *options: str) -> Iterator[System]:
    usual = ("--model", str(model), "--dtype", "float32", "--start-timeout-s", "240", "--local-prefill-tokens", "0")
    with running_system(folder, *usual, *options) as system:
        system.wait_usable(decode=2 if "--decode" in options else 1, timeout_s=240)
        yield system
        system.wait_whole()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_tokens_equal_those_of_transformers(name: str, options: str, tmp_path: Path) -> None:
    """Prompts of 1 to 1,000 tokens at once, in chunks and with shared prefixes; before that one alone, so that other ranks have none."""
    model = make_tiny(name, tmp_path / name)
    num_tables = kv_spec(load_model_config(model), "float32").num_tables
    longest = min(1000, TINY[name].config.get_text_config().max_position_embeddings - NEW_TOKENS)
    prompts = make_prompts(TINY[name].vocab_size, longest)
    config = tmp_path / "nodes.toml"
    blocks = (longest + NEW_TOKENS) // 16 + 2
    config.write_text(
        f"[prefill]\nkv_blocks = {400 * num_tables}\nmax_num_batched_tokens = {PREFILL_CHUNK}\n"
        f"[decode]\nkv_blocks = {blocks * num_tables}\n"
    )
    with cluster(tmp_path, model, "--max-num-seqs", "16", "--config", str(config), *options.split()) as system:
        check_answers(system, model, name, prompts[4:5])
        check_answers(system, model, name, prompts)
        assert system.metric("kvrelay_relay_bytes_total") > 0, "the relay is real"


def received_by_rank(system: System) -> Counter[str]:
    """Bytes of KV that came to each rank of the decode node."""
    found: Counter[str] = Counter()
    for pair in system.admin("node", "decode-0")["node"]["relays"]:
        found[pair["ranks"].partition(" ")[0]] += pair["bytes"]
    return found


def test_a_sequence_is_on_one_rank_with_its_adapter_and_what_is_asked_of_its_prompt(tmp_path: Path) -> None:
    """KV that tensor-parallel ranks would split or repeat comes whole to one rank; LoRA adapters, log-probabilities of prompts and
    hits in the prefix cache are as on one rank."""
    name = "qwen3-moe"
    model = make_tiny(name, tmp_path / name)
    adapter = write_adapter(tmp_path / "adapter", model)
    merged = merge(model, adapter, tmp_path / "merged")
    spec, vocab = kv_spec(load_model_config(model), "float32"), TINY[name].vocab_size
    prompts = [[(11 * i + 7 * j) % (vocab - 3) + 3 for j in range(16 * (2 + i))] for i in range(4)]
    options = f"--prefill-tp 2 {PREFILL} --decode-tp 2 {DECODE} --kv-blocks 300 --lora ad={adapter}"
    with cluster(tmp_path, model, *options.split()) as system:

        def ask(prompt: list[int], model: str = name, **asked: Any) -> dict[str, Any]:
            body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(
                f"{system.url}/v1/completions", json={**body, "return_token_ids": True, **asked}, timeout=120.0
            )
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        before, homes = received_by_rank(system), set[str]()
        for prompt in prompts:
            assert ask(prompt)["token_ids"] == greedy(model, prompt, NEW_TOKENS).tokens
            whole = len(prompt) * spec.bytes_per_token
            count = sum(before.values()) + whole
            wait_until(lambda: sum(received_by_rank(system).values()) == count, 20, "the relayed bytes are counted")  # noqa: B023
            after = received_by_rank(system)
            assert list((after - before).values()) == [whole], "a sequence's KV is on one rank, all of it"
            homes |= set(after - before)
            before = after
        assert len(homes) == 2, "both ranks have sequences"
        again = [*prompts[3], 5]
        assert ask(again)["token_ids"] == greedy(model, again, NEW_TOKENS).tokens
        name_of_hits, cached = "vllm:prefix_cache_hits_total", len(prompts[3])
        wait_until(
            lambda: system.metric(name_of_hits, role="prefill") == cached, 20, "the prompt is found in the cache"
        )
        assert sum((received_by_rank(system) - before).values()) <= spec.bytes_per_token * 16, "it found its rank"
        assert ask(prompts[1], "ad")["token_ids"] == greedy(merged, prompts[1], NEW_TOKENS).tokens
        expected = prompt_logprobs(model, prompts[2])
        found = ask(prompts[2], prompt_logprobs=0)["prompt_logprobs"][1:]
        for row, token, each in zip(expected, prompts[2][1:], found, strict=True):
            assert abs(each[str(token)]["logprob"] - float(row[token])) < 1e-3


def test_streams_go_on_after_preemptions_and_a_killed_rank(tmp_path: Path) -> None:
    """Two decode nodes of two ranks each, with few blocks: while all requests run, a rank of one node is killed."""
    name, new_tokens = "qwen3-moe", 120
    model = make_tiny(name, tmp_path / name)
    prompts = matrix_prompts(TINY[name].vocab_size)
    config = tmp_path / "nodes.toml"
    config.write_text("[prefill]\nkv_blocks = 200\n[decode]\nkv_blocks = 22\n")
    options = ("--config", str(config), "--decode", "2", "--decode-tp", "2", DECODE)
    with cluster(tmp_path, model, *options) as system:
        check_a_killed_rank(system, model, name, prompts, new_tokens)
