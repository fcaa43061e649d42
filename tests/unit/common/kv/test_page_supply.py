"""`common.kv.page_supply`: pages are there before the first write, within limits, and keep what they hold."""

from __future__ import annotations

import math
import mmap
import sys

import pytest

from common.kv.page_supply import supply_pages

_SIZE = 8 * 2**20
_PLANES = [(0, _SIZE // 2), (_SIZE // 2, _SIZE // 2)]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are supplied on Linux")


def _memory(**options: int) -> mmap.mmap:
    return mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, **options)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def test_pages_are_resident_without_a_write_and_keep_their_content() -> None:
    memory = _memory()
    memory[3_000_000:3_000_005] = b"block"
    before = _resident_bytes()
    assert supply_pages(memory, _PLANES, 10, math.inf) == _SIZE
    assert _resident_bytes() - before > _SIZE * 0.7
    assert memory[3_000_000:3_000_005] == b"block"
    assert not any(memory[:1000])


@pytest.mark.parametrize(("limit_s", "limit_bytes", "supplied"), [(-1, math.inf, 0), (10, 5 * 2**20, 4 * 2**20)])
def test_limits_of_time_and_memory_hold(limit_s: float, limit_bytes: float, supplied: int) -> None:
    assert supply_pages(_memory(), _PLANES, limit_s, limit_bytes) == supplied


def test_memory_that_cannot_be_supplied_is_left_to_the_first_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert supply_pages(_memory(prot=mmap.PROT_READ), _PLANES, 10, math.inf) == 0
    assert "come with the first write" in caplog.text
