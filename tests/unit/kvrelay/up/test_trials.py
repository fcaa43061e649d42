"""The requests that the banner shows work for the models that are served, and one of them is relayed if a prompt can be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from common.base.errors import BadRequest
from common.control.messages import Task
from kvrelay.up.trials import Trial, trials


class Router:
    """Explains how it would place prompts; `relayed_from`: words from which on they are relayed."""

    def __init__(self, *, has_template: bool = True, relayed_from: int = 100, longest: int = 10_000) -> None:
        self._has_template, self._relayed_from, self._longest = has_template, relayed_from, longest

    def explain(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        words = len(body["prompt"].split())
        if words > self._longest or (body.get("chat") and not self._has_template):
            raise BadRequest("no")
        return {"mode": "relayed" if words >= self._relayed_from else "local"}


def body_of(trial: Trial) -> dict[str, Any]:
    """The body that a shell sends."""
    done = subprocess.run(
        ["sh", "-c", f"printf %s {trial.word}"], capture_output=True, text=True, check=True, timeout=10
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("models", "path"),
    [
        ({"e": "embed"}, "/v1/embeddings"),
        ({"s": "score"}, "/v1/rerank"),
        ({"e": "embed", "demo": "generate"}, "/v1/chat/completions"),
        ({"it's": "generate"}, "/v1/chat/completions"),
    ],
)
def test_the_first_request_suits_what_is_served(models: dict[str, Task], path: str) -> None:
    first = trials(models, Router().explain)[0]
    assert first.path == path
    assert body_of(first)["model"] == list(models)[-1]


def test_a_model_without_a_chat_template_gets_no_conversation() -> None:
    first = trials({"base": "generate"}, Router(has_template=False).explain)[0]
    assert first.path == "/v1/completions"
    assert {name: body_of(first)[name] for name in ("prompt", "temperature")} == {
        "prompt": "The capital of France is",
        "temperature": 0,
    }


def test_the_second_request_has_the_prompt_that_the_router_would_relay() -> None:
    _, second = trials({"demo": "generate"}, Router(relayed_from=100).explain)
    assert "relayed" in second.shows
    assert body_of(second)["prompt"].split() == [str(number) for number in range(1, 121)]


@pytest.mark.parametrize("router", [Router(relayed_from=10**9), Router(relayed_from=500, longest=400)])
def test_nothing_more_is_shown_where_no_prompt_would_be_relayed(router: Router) -> None:
    assert len(trials({"demo": "generate"}, router.explain)) == 1
