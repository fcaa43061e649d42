"""What a run's results say of prompts that the server had cached before it."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvrelay.load import cli, show
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.results import cached_before, run_result

PLAN = LoadPlan(url="http://x", model="m", concurrency=1, requests=8, prefix_tokens=256, suffix_tokens=64, seed=5)


def served(prompt: int, cached: int) -> list[RequestOutcome]:
    return [RequestOutcome(n, 0.1 * n, ended_s=1.0, prompt_tokens=prompt, cached_tokens=cached) for n in range(8)]


def shown(result: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(show.run(result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_whose_prompts_another_run_sent_before_is_told_so() -> None:
    again, first = (run_result(PLAN, [served(320, cached)], (None, None), began=0.0) for cached in (304, 256))
    assert again["cached_before"] == 0.75
    assert "75 % of what is unique in each prompt was in the server's cache before this run" in shown(again)
    assert "--seed 5" in shown(again)
    assert first["cached_before"] == 0.0
    assert "before this run" not in shown(first)


@pytest.mark.parametrize(
    ("change", "prompt", "cached", "share"),
    [
        ({}, 340, 276, 0.0),  # a chat template's tokens are shared
        ({"longest_tokens": 500}, 656, 256, 0.0),
        ({"longest_tokens": 500}, 656, 640, 0.96),
        ({"suffix_tokens": 0}, 256, 240, 0.0),
        ({"turns": 3}, 900, 890, 0.0),
    ],
)
def test_only_what_no_other_request_of_the_run_has_counts(
    change: dict[str, Any], prompt: int, cached: int, share: float
) -> None:
    assert cached_before(dataclasses.replace(PLAN, **change), served(prompt, cached)) == share


def test_every_run_has_a_seed_of_its_own_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(cli, "check_usage", lambda plan: seeds.append(plan.seed))
    for more in ((), (), ("--seed", "7")):
        CliRunner().invoke(cli.app, ["run", "--url", "http://x", "--concurrency", "1", "--requests", "1", *more])
    assert len(set(seeds)) == 3
    assert seeds[-1] == 7
