"""Ranks forked from a process that has imported torch already, because importing it again takes seconds for each.

Works only while that process has one thread and no event loop, and without GPUs: these do not survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from common.base.process import die_with_parent, flush_output, ignore_terminal, run_and_end

RunRank = Callable[[dict[str, Any], int, str], None]
"""(fields of the configuration, rank, address of its leader): runs the rank to its end."""

_POLL_S = 0.01


class ForkedRank:
    """A child process that waits for `begin` and dies with its parent. Has the part of `subprocess.Popen` that `RankLinks`
    uses.

    Must be created in the main thread, before there is a second one.
    """

    def __init__(self, run: RunRank) -> None:
        orders, self._orders = os.pipe()
        parent_pid = os.getpid()
        flush_output()  # otherwise the child would write it too
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            run_and_end(lambda: _be_rank(run, orders, parent_pid))
        os.close(orders)

    def begin(self, fields: dict[str, Any], rank: int, leader: str) -> None:
        """Have the child run as this rank; one that has died meanwhile shows in `poll`."""
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._orders, "w") as orders:
            orders.write(json.dumps([fields, rank, leader]) + "\n")

    def poll(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs. Any thread."""
        with self._lock:  # waitpid returns the status once only
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once the process has ended. Raises: subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def terminate(self) -> None:
        """Send SIGTERM, if it runs."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:  # until waitpid has returned the status, the process id is not reused
            if self.returncode is None:
                os.kill(self.pid, number)


def _be_rank(run: RunRank, orders: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    ignore_terminal()
    with os.fdopen(orders) as lines:
        fields, rank, leader = json.loads(lines.readline())
    run(fields, rank, leader)
