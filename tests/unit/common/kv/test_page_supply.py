"""`common.kv.page_supply`: pages are there before the first write, and keep what they hold."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from common.kv.page_supply import supply_pages

_SIZE = 5 * 2**20
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are supplied on Linux")


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def _supply(memory: mmap.mmap) -> None:
    thread = supply_pages(np.frombuffer(memory, np.uint8).ctypes.data, len(memory))
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


def test_pages_are_resident_without_a_write_and_keep_their_content() -> None:
    memory = mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[3_000_000:3_000_005] = b"block"
    before = _resident_bytes()
    _supply(memory)
    assert _resident_bytes() - before > _SIZE * 0.8
    assert memory[3_000_000:3_000_005] == b"block"
    assert not any(memory[:1000])


def test_memory_that_cannot_be_supplied_is_left_to_the_first_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _supply(mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ))
    assert "come with the first write" in caplog.text
