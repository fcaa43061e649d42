"""Ids of requests."""

from __future__ import annotations

import random

import pytest

import router.http.response_headers as response_headers


def test_request_ids_are_random_bytes_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guessed, they would let others name a request's KV and its story."""
    monkeypatch.setattr(response_headers, "_pool", [])
    monkeypatch.setattr(response_headers.os, "urandom", random.Random(0).randbytes)
    made = {response_headers.RequestIds.make("cmpl", "").own for _ in range(256)}
    assert len(made) == 256
    assert "cmpl-" + random.Random(0).randbytes(256 * 12)[:12].hex() in made
