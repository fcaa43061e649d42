"""Progress: lines where standard error is no terminal, and the share by count or by time."""

from __future__ import annotations

import time

import pytest

from common.base import progress
from common.base.progress import LiveProgress


def test_a_pipe_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    shown = ""
    with LiveProgress("demo", total=40, details=lambda: "TTFT p50 3 ms") as live:
        for _ in range(10):
            live.advance()
        while "10 of 40" not in shown:
            time.sleep(0.005)
            shown += capsys.readouterr().err
    assert "demo: 25 % after 0 s, 10 of 40 done, TTFT p50 3 ms\n" in shown
    assert "\x1b" not in shown


def test_the_share_is_of_the_count_or_of_the_time_whichever_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    live = LiveProgress("demo", total=10, duration_s=20.0)
    now[0] = 115.0
    assert live.share() == pytest.approx(0.75)
    for _ in range(9):
        live.advance()
    assert live.share() == pytest.approx(0.9)
    now[0] = 200.0
    assert live.share() == 1.0
    assert LiveProgress("demo").share() is None
    assert "%" not in LiveProgress("demo").line()
