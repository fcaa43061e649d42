"""The tests' own stopwatch: a stall of the whole process does not count, anything else does."""

from __future__ import annotations

import ctypes
import time

from support.steady import SteadyTime


def test_what_the_process_stands_still_does_not_count() -> None:
    with SteadyTime() as steady:
        ctypes.PyDLL(None).usleep(700_000)  # with the interpreter's lock, so that no thread runs
        assert steady.passed_s < 0.35


def test_waiting_counts() -> None:
    with SteadyTime() as steady:
        started_s = time.monotonic()
        time.sleep(0.3)
        took_s = time.monotonic() - started_s
        assert steady.passed_s > min(0.2, took_s) or took_s > 0.5
