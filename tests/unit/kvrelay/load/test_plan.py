"""Load plans with contradictory settings."""

from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from kvrelay.load.plan import LoadPlan


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--rate"),
        ({"rate": 1.0}, "--requests or --duration"),
        ({"rate": 1.0, "concurrency": 1, "requests": 1}, "not both"),
        ({"rate": 1e-300, "requests": 1}, "--rate must be at least 1e-06"),
        ({"trace": "x", "chat": True}, "--chat"),
        ({"trace": "x", "turns": 2}, "--turns"),
        ({"concurrency": 1, "requests": 1, "burst_size": 3}, "--burst-size"),
        ({"rate": 1.0, "requests": 1, "ramp_from": 0.5}, "--duration"),
        ({"rate": 1.0, "requests": 1, "longest_tokens": 5}, "--longest-tokens"),
        ({"rate": 1.0, "requests": 1, "tools": True}, "--turns"),
        ({"trace": "x", "scale": 3}, "512"),
        ({"trace": "x", "rate": 2.0}, "--rate-scale"),
        ({"concurrency": 2, "processes": 3, "requests": 9}, "3 processes"),
        ({"rate": 1.0, "requests": 1, "prefix_tokens": 0, "suffix_tokens": 0}, "empty"),
    ],
)
def test_contradictory_plans_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoadPlan(url="http://x", model="m", **options).check()  # type: ignore[arg-type]
