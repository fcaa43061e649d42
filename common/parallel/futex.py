"""Sleeping until a word of shared memory changes: Linux futexes. Called from a rank's engine thread."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

SHM_DIR = Path("/dev/shm")  # noqa: S108 - shared memory is there

_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1

AVAILABLE = sys.platform == "linux" and platform.machine() == "x86_64" and SHM_DIR.is_dir()
"""Elsewhere the system call's number differs, and other processors may reorder the plain stores that we rely on."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _futex_call():
    call = ctypes.CDLL(None).syscall
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]
    call.restype = ctypes.c_long
    return call


_syscall = _futex_call() if AVAILABLE else None


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `expected`, at most `timeout_s`. May return early."""
    assert _syscall is not None
    seconds, fraction = divmod(timeout_s, 1.0)
    limit = _Timespec(int(seconds), int(fraction * 1e9))
    _syscall(_SYS_FUTEX, address, _WAIT, expected, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake all threads that wait on `address`, in any process."""
    assert _syscall is not None
    _syscall(_SYS_FUTEX, address, _WAKE, _ALL, None)
