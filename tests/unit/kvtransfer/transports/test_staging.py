"""Buffers in which messages are gathered."""

from __future__ import annotations

from kvtransfer.transports.base import StagingPool


def test_buffers_have_the_wanted_size_and_begin_at_cache_lines() -> None:
    pool = StagingPool(1000, keep=8)
    buffers = [pool.take() for _ in range(8)]
    assert {len(buffer) for buffer in buffers} == {1000}
    assert {buffer.ctypes.data % 64 for buffer in buffers} == {0}
    for buffer in buffers:
        pool.give_back(buffer)
    assert {pool.take().ctypes.data for _ in buffers} == {buffer.ctypes.data for buffer in buffers}
