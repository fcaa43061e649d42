"""Log-probabilities of the whole vocabulary, through a real cluster: `top_logprobs`, `logprobs` and `prompt_logprobs` of -1."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.system import System, running_system

VOCAB = 2048
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
GREEDY = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
Entries = list[dict[str, Any]]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("whole")
    with running_system(folder, "--max-logprobs", "-1", "--kv-memory-gb", "0.1") as system:
        system.wait_usable()
        yield system


def ask(system: System, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{system.url}/v1/{path}", json={**GREEDY, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def check_whole(entries: list[float]) -> None:
    assert len(entries) == VOCAB
    assert sum(map(math.exp, entries)) == pytest.approx(1)
    assert entries == sorted(entries, reverse=True)


def test_top_logprobs_in_chat(system: System) -> None:
    chat = {"messages": MESSAGES, "logprobs": True}
    whole: Entries = ask(system, "chat/completions", **chat, top_logprobs=-1)["choices"][0]["logprobs"]["content"]
    five: Entries = ask(system, "chat/completions", **chat, top_logprobs=5)["choices"][0]["logprobs"]["content"]
    assert len(whole) == len(five) == 3
    for all_of_it, some in zip(whole, five, strict=True):
        check_whole([each["logprob"] for each in all_of_it["top_logprobs"]])
        assert {**all_of_it, "top_logprobs": all_of_it["top_logprobs"][:5]} == some
    chunks = ask(system, "chat/completions", **chat, top_logprobs=-1, stream=True)
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for each in shown if each for entry in each["content"]] == whole


def test_logprobs_in_completions_also_of_an_echoed_prompt(system: System) -> None:
    text = {"prompt": "the quick brown fox", "return_tokens_as_token_ids": True}
    whole = ask(system, "completions", **text, logprobs=-1)["choices"][0]["logprobs"]
    five = ask(system, "completions", **text, logprobs=5)["choices"][0]["logprobs"]
    assert {**whole, "top_logprobs": None} == {**five, "top_logprobs": None}
    for all_of_it, some in zip(whole["top_logprobs"], five["top_logprobs"], strict=True):
        check_whole(sorted(all_of_it.values(), reverse=True))
        assert list(all_of_it.items())[:5] == list(some.items())[:5]
    echoed = ask(system, "completions", **text, logprobs=-1, echo=True)["choices"][0]["logprobs"]
    first, *others = echoed["top_logprobs"]
    assert first is None
    assert [len(top) for top in others] == [VOCAB] * len(others)
    assert others[-3:] == whole["top_logprobs"]
    chunks = ask(system, "completions", **text, logprobs=-1, echo=True, stream=True)
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [top for each in shown if each for top in each["top_logprobs"]] == echoed["top_logprobs"]


def test_prompt_logprobs(system: System) -> None:
    for path, prompt in (
        ("completions", {"prompt": "the quick brown fox " * 9}),
        ("chat/completions", {"messages": MESSAGES}),
    ):
        found: list[list[Any]] = []
        for count in (-1, 5):
            body = ask(system, path, **prompt, prompt_logprobs=count)
            found.append((body["choices"][0] if path == "completions" else body)["prompt_logprobs"])
        assert found[0][0] is None
        assert len(found[0]) == len(found[1]) > 5
        for all_of_it, some in zip(found[0][1:], found[1][1:], strict=True):
            check_whole(sorted([each["logprob"] for each in all_of_it.values()], reverse=True))
            assert next(iter(all_of_it.items())) == next(iter(some.items()))  # the prompt's own token
            assert some.items() <= all_of_it.items()


def test_a_few_such_answers_are_made_at_a_time_and_others_refused(system: System) -> None:
    body = {**GREEDY, "prompt": "fox", "max_tokens": 40, "logprobs": -1}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: httpx.post(f"{system.url}/v1/completions", json=body, timeout=60), range(16)))
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 429}
    assert ask(system, "completions", prompt="fox", logprobs=-1)["choices"]
