"""Headers of answers: ids of requests, and what scripts of other pages may read."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import router.http.response_headers as response_headers


def test_request_ids_are_random_bytes_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guessed, they would let others name a request's KV and its story."""
    monkeypatch.setattr(response_headers, "_pool", [])
    monkeypatch.setattr(response_headers.os, "urandom", random.Random(0).randbytes)
    made = {response_headers.RequestIds.make("cmpl-", "").own for _ in range(256)}
    assert len(made) == 256
    assert "cmpl-" + random.Random(0).randbytes(256 * 12)[:12].hex() in made


def test_scripts_of_other_pages_may_read_every_documented_header() -> None:
    docs = Path(__file__).parents[4] / "docs"
    table = (docs / "routing.md").read_text("utf-8").partition("## Response headers")[2].partition("\n\nA stream")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.M)[1:]
    documented = {f"x-kvrelay-{name}" for cell in cells for name in re.findall(r"`([a-z-]+)`", cell)}
    documented |= set(re.findall(r"`(x-kvrelay-[a-z-]+)`", (docs / "api.md").read_text("utf-8")))
    assert documented == set(response_headers.OWN_HEADERS)
