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
"""How long a write waits for the reader. After that, further ones do not wait until the reader has read again."""
_RETRY_S = 0.001


class Output:
    """`stream`, or in its place the descriptor behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = _descriptor_of(stream)
        self._is_stalled = False
        self._is_cut = False
        """The latest line lacks its end."""

    def write(self, text: str) -> None:
        """Write whole lines; characters that the stream's encoding lacks are escaped.

        Raises: BlockingIOError if the reader does not read: the text is lost or cut; OSError as the stream does.
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
    """Write the beginning of `data` as soon as there is room. Returns how many bytes; 0 without room for them."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(max(0.0, timeout_s) * 1000):
        return 0
    try:
        return os.write(descriptor, data[: select.PIPE_BUF])  # a pipe that is writable takes so much at once
    except BlockingIOError:
        time.sleep(_RETRY_S)
        return 0


def _descriptor_of(stream: TextIO) -> int | None:
    """None if there is none."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return None
    if os.isatty(descriptor):  # it may have room for a part and block for the rest, but not if it is opened like this
        with contextlib.suppress(OSError):
            return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor
