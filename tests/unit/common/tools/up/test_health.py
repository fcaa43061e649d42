"""What `kvrelay up` makes of a router's health."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.base.errors import ConfigError
from common.tools.up.health import HealthProbe


def sees(monkeypatch: pytest.MonkeyPatch, health: dict[str, Any] | None) -> bool:
    async def answer(self: HealthProbe, url: str) -> dict[str, Any] | None:
        return health

    monkeypatch.setattr(HealthProbe, "health", answer)
    return asyncio.run(HealthProbe().sees("http://a", {"prefill": 1, "decode": 1, "pooling": 0}))


def test_the_start_waits_for_nodes_and_for_their_model_and_ends_where_the_model_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not sees(monkeypatch, None)
    assert not sees(monkeypatch, {"status": "ok", "prefill": 1, "decode": 0, "pooling": 0, "refused": []})
    assert not sees(monkeypatch, {"status": "unavailable", "prefill": 1, "decode": 2, "pooling": 0})
    assert sees(monkeypatch, {"status": "ok", "prefill": 1, "decode": 2, "pooling": 0})
    assert sees(monkeypatch, {"status": "degraded", "prefill": 1, "decode": 1, "pooling": 0})
    with pytest.raises(ConfigError, match="no tokenizer"):
        sees(monkeypatch, {"prefill": 1, "decode": 1, "refused": ["the model 'm': no tokenizer.json in /m"]})
