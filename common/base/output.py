"""Writes lines to standard output or standard error without waiting for a reader that has stopped reading: a terminal
after Ctrl-S, a pager, a broken SSH connection, a hanging log collector. The log must not block the service. Any thread, one
at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from typing import TextIO

_PATIENCE_S = 0.2
"""How long a write waits for the reader. Once this time has passed, no write waits until the reader reads again."""
_RETRY_S = 0.001


class Output:
    """Writes to `stream`, or directly to its file descriptor if it has one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = _descriptor_of(stream)
        self._is_stalled = False
        self._is_cut = False
        """Whether the latest line was written only in part."""

    def write(self, text: str) -> None:
        """Write whole lines; characters that the stream's encoding does not have are escaped.

        Raises: BlockingIOError if the reader does not read, so that the text is lost or cut; OSError from the stream.
        """
        if self._descriptor is None:
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(self._stream.encoding, "backslashreplace")
        rest = memoryview(b"\n" + data if self._is_cut else data)
        until_s = time.monotonic() + (0.0 if self._is_stalled else _PATIENCE_S)
        while rest:
            if written := _write_now(self._descriptor, rest, until_s - time.monotonic()):
                rest, self._is_cut = rest[written:], True
            elif time.monotonic() >= until_s:
                self._is_stalled = True
                raise BlockingIOError(errno.EAGAIN, "nobody reads")
        self._is_stalled = self._is_cut = False


def _write_now(descriptor: int, data: memoryview, timeout_s: float) -> int:
    """Write the beginning of `data` as soon as the reader has room. Returns the bytes written; 0 if the time is over."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(max(0.0, timeout_s) * 1000):
        return 0
    try:
        return os.write(descriptor, data[: select.PIPE_BUF])  # a writable pipe accepts PIPE_BUF bytes without blocking
    except BlockingIOError:
        time.sleep(_RETRY_S)
        return 0


def _descriptor_of(stream: TextIO) -> int | None:
    """The file descriptor of a stream, for a terminal a new one that does not block; None if it has none."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return None
    if os.isatty(descriptor):  # a write that fits only in part would block, unless the terminal is opened like this
        with contextlib.suppress(OSError):
            return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor
