"""The I/O thread of a transfer end: its life cycle, its commands and its event reports."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from common.base.errors import TransferError
from common.control.messages import AttemptKey
from common.engine.kv_transfer import OnTransferEvent, TransferEvent
from kvtransfer.mailbox import Command, Mailbox

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
"""Longest pause after a failure: a thread whose every turn fails must neither fill the log nor occupy a core."""


class IOThread:
    """A thread that calls `turn` repeatedly until `stop`, then `finish` once.

    `turn` waits for work, which includes the mailbox, and calls `run_commands`. An exception in it is logged and passed to
    `recover`; the thread continues after a pause, which grows while every turn fails.
    """

    def __init__(
        self,
        name: str,
        on_event: OnTransferEvent,
        *,
        turn: Callable[[], None],
        recover: Callable[[Exception], None],
        finish: Callable[[], None],
    ) -> None:
        self.mailbox = Mailbox()
        self._on_event = on_event
        self._turn, self._recover, self._finish = turn, recover, finish
        self._lock = threading.Lock()
        self.closing = False
        """`stop` has been called; the thread may not know yet. For any thread."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, key: AttemptKey, command: Command) -> None:
        """Run `command`, which opens `key`. Raises: TransferError if the thread is stopped."""
        with self._lock:
            if self.closing:
                raise TransferError(f"cannot open {key}: the relay is closed on this rank")
            # Under the lock, so that a concurrent `stop` comes after it and releases the key.
            self.mailbox.put(command)

    def stop(self) -> None:
        """Finish and join. Calls by the thread itself do not wait."""
        with self._lock:
            first, self.closing = not self.closing, True
        if first:
            self.mailbox.put(self._request_stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def run_commands(self) -> None:
        """Run all commands in the mailbox. A failing command does not prevent later ones."""
        for command in self.mailbox.take():
            self._guard(command)

    def report(self, events: Iterable[TransferEvent]) -> None:
        """Pass events to the owner. A failing callback does not prevent later ones."""
        for event in events:
            try:
                self._on_event(event)
            except Exception:
                log.exception("the callback failed on %s", event)

    def _request_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping:
            if self._guard(self._turn):
                pause_s = 0.0
                continue
            # The turn may have failed before it ran them, and one of them may stop the thread.
            self.run_commands()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s + 0.001, _PAUSE_S)
        self._guard(self._finish)
        self.mailbox.close()

    def _guard(self, action: Command) -> bool:
        """Run `action` and recover from an exception. Returns whether there was none."""
        try:
            action()
        except Exception as error:
            log.exception("%s failed and drops its transfers", self._thread.name)
            try:
                self._recover(error)
            except Exception:
                log.exception("%s could not recover", self._thread.name)
            return False
        return True
