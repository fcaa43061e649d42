"""`common.kv.page_supply`: pages are there before the first write, within limits, and keep what they hold."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable

import pytest

from common.kv.page_supply import PageSupply, SpareCores

_SIZE = 8 * 2**20
_PLANES = [(0, _SIZE // 2), (_SIZE // 2, _SIZE // 2)]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are supplied on Linux")


def _memory() -> mmap.mmap:
    return mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def test_pages_are_resident_without_a_write_and_keep_their_content() -> None:
    memory = _memory()
    memory[3_000_000:3_000_005] = b"block"
    before = _resident_bytes()
    supply = PageSupply(_address(memory), _PLANES, 16, math.inf)
    assert [supply.advance() for _ in range(6)] == [True] * 4 + [False] * 2
    assert supply.supplied_bytes == _SIZE
    assert _resident_bytes() - before > _SIZE * 0.7
    assert memory[3_000_000:3_000_005] == b"block"
    assert not any(memory[:1000])


def test_idle_time_is_used_while_other_processes_leave_cores_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = [False]
    monkeypatch.setattr(SpareCores, "are_there", lambda self: spare[0])
    memory = _memory()
    supply = PageSupply(_address(memory), _PLANES, 16, math.inf)
    assert [supply.use_idle_time(), supply.supplied_bytes] == [1.0, 0]
    spare[0] = True
    assert [supply.use_idle_time() for _ in range(5)] == [0.0] * 4 + [None]
    assert supply.supplied_bytes == _SIZE
    spare[0] = False
    assert supply.use_idle_time() is None, "there is nothing left to wait for"


def test_the_limit_of_memory_holds() -> None:
    memory = _memory()
    supply = PageSupply(_address(memory), _PLANES, 16, 5 * 2**20)
    while supply.advance():
        pass
    assert supply.supplied_bytes == 4 * 2**20


def test_memory_that_cannot_be_supplied_is_left_to_the_first_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    unmapped = PageSupply(0, _PLANES, 16, math.inf)
    assert [unmapped.advance(), unmapped.advance()] == [False, False]
    assert caplog.text.count("come with the first write") == 1


def test_a_thread_keeps_ahead_of_the_blocks_in_use_and_no_further(eventually: Callable[..., None]) -> None:
    size = 64 * 2**20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    planes = [(0, size // 2), (size // 2, size // 2)]  # of 64 blocks of half a MB
    supply = PageSupply(_address(memory), planes, 64, math.inf)
    supply.reach(0)  # at a node's start
    assert "kv-pages" not in [thread.name for thread in threading.enumerate()]
    supply.reach(1)  # 1 MB of each plane, and 4 MB ahead
    eventually(lambda: supply.supplied_bytes == 2 * 6 * 2**20)
    supply.reach(0)
    supply.reach(4)  # 2.5 MB, and 4 ahead
    eventually(lambda: supply.supplied_bytes == 2 * 8 * 2**20)
    assert supply.advance()
    supply.reach(63)
    eventually(lambda: supply.supplied_bytes == size)
    assert not supply.advance()
    eventually(lambda: "kv-pages" not in [thread.name for thread in threading.enumerate()])
