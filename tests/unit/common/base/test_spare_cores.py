"""`common.kv.page_supply`: whether other processes leave cores idle."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from common.kv.page_supply import LOOK_S, SpareCores


def test_cores_are_spare_while_others_use_little_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = [0.0], [(0.0, 0.0)]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    spare = SpareCores(lambda: used[0])

    def look_after(others_s: float, all_s: float) -> bool:
        now[0] += LOOK_S
        used[0] = used[0][0] + others_s, used[0][1] + all_s
        return spare.are_there()

    assert spare.are_there()
    assert not look_after(0.3, 0.4)
    used[0] = used[0][0], used[0][1] + 0.4
    assert not spare.are_there(), "the next look is after LOOK_S"
    assert look_after(0.0, 0.0)
    assert look_after(0.1, 0.4)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere cores are always spare")
def test_other_processes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = SpareCores()
    others_s, all_s = spare._before
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.0)
        busy.kill()
    monkeypatch.setattr(time, "monotonic", lambda: spare._look_at_s)
    spare.are_there()
    assert spare._before[0] - others_s > 0.3
    assert spare._before[1] - all_s > spare._before[0] - others_s - 0.1
