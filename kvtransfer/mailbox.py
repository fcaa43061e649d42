"""Passes commands from any thread to one I/O thread that waits in a poller."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Command = Callable[[], None]


class Mailbox:
    """Commands in order, and a file descriptor that is readable while commands wait.

    `put` may be called by any thread and takes microseconds: it appends, and writes one byte only if the reader has not
    been woken yet. Its users bound its length: a transfer has one open, grant and abort, and one progress report per layer
    and chunk.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._woken = False
        self._closed = False

    def fileno(self) -> int:
        """The file descriptor to poll for reading."""
        return self._reader.fileno()

    def put(self, command: Command) -> None:
        """Let the I/O thread run `command`; never blocks."""
        if self._closed:
            return
        self._commands.append(command)
        if not self._woken:
            self._woken = True
            # If it is full, unread bytes wake the reader anyway; if it is closed, nobody reads it any more.
            with suppress(BlockingIOError, OSError):
                self._writer.send(b"\0")

    def take(self) -> list[Command]:
        """All commands put so far. Only for the I/O thread."""
        with suppress(BlockingIOError):
            self._reader.recv(4096)
        # Cleared before the commands are read, so that a later `put` wakes the reader again.
        self._woken = False
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def close(self) -> None:
        """Close the file descriptors; later commands are never run."""
        self._closed = True
        self._reader.close()
        self._writer.close()
