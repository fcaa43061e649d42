"""An I/O thread whose turns fail: it keeps running, does not spin or flood the log, and can be stopped."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.transfer_harness import DEADLINE_S, wait_until

from common.control.messages import AttemptKey
from common.engine.kv_transfer import SourceReleased, TransferEvent
from kvtransfer.iothread import IOThread

KEY = AttemptKey("r", 1)


class Failing:
    """A thread whose every turn fails before it runs its commands."""

    def __init__(self, *, recovers: bool = True) -> None:
        self.turns = 0
        self.recovered = 0
        self.finished = threading.Event()
        self.events: list[TransferEvent] = []
        self._recovers = recovers
        self.thread: IOThread = IOThread(
            "kv-failing", self.events.append, turn=self._turn, recover=self._recover, finish=self.finished.set
        )
        self.thread.start()

    def _turn(self) -> None:
        self.turns += 1
        raise RuntimeError("the poller is broken")

    def _recover(self, error: Exception) -> None:
        self.recovered += 1
        if not self._recovers:
            raise ValueError("recovery fails, too")

    def close(self) -> None:
        closing = threading.Thread(target=self.thread.stop, daemon=True)
        closing.start()
        closing.join(DEADLINE_S)
        assert not closing.is_alive(), "close hangs"
        assert self.finished.is_set()


@pytest.mark.parametrize("recovers", [True, False])
def test_thread_whose_every_turn_fails_still_takes_commands_and_ends(recovers: bool) -> None:
    end = Failing(recovers=recovers)
    opened = threading.Event()
    end.thread.begin(KEY, opened.set)
    assert opened.wait(DEADLINE_S)
    end.thread.report([SourceReleased(KEY, 0)])
    end.thread.begin(KEY, lambda: None)
    end.close()


def test_thread_whose_every_turn_fails_does_not_spin() -> None:
    end = Failing()
    quiet = threading.Event()
    wait_until(lambda: end.turns > 1, "it keeps running")
    quiet.wait(0.3)
    assert end.turns < 20
    assert end.recovered >= end.turns - 1
    end.close()


def test_thread_closes_its_mailbox_even_if_finish_fails() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    cleared: list[Exception] = []
    thread: IOThread = IOThread(
        "kv-failing", fail, turn=lambda: thread.run_commands(), recover=cleared.append, finish=fail
    )
    thread.start()
    thread.stop()
    assert len(cleared) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        thread.mailbox._reader.getsockname()
