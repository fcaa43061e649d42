"""The leader's links to the other ranks of its node: starting their processes, sending orders, receiving reports.

Ranks share fate: when one ends, fails or falls silent, `on_dead` is called and the node must end. Reports are
read by a thread of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import zmq

from common.base.clock import monotonic
from common.base.errors import ConfigError, ProtocolError, RankLost, from_code
from common.base.process import end_children, module_command, tied_command
from common.control.messages import Role
from common.engine.executor import LocalExecutor, RunningStep
from common.engine.step import StepInput, StepOutput
from common.node.ranks.forked import ForkedRank
from common.node.ranks.messages import (
    MAX_REPORT_BYTES,
    LeaderBeat,
    RankBeat,
    RankBusy,
    RankCodec,
    RankFailed,
    RankHello,
    RankOrder,
    RankReady,
    RankReport,
    RankStarted,
)
from common.node.ranks.sockets import RankInbox, RankOutbox

log = logging.getLogger(__name__)

ReportT = TypeVar("ReportT", RankHello, RankReady, RankStarted)
ResultT = TypeVar("ResultT")

_PROGRESS_EVERY_S = 5.0
_LAST_LOOK_S = 1.0
"""Time to read reports that are there already, when the deadline has passed."""
_LAST_REPORT_S = 0.5
"""On a busy machine the last report of a rank may take this long to be read after the rank has ended."""
_CRASHES = {-signal.SIGSEGV, -signal.SIGBUS}
"""Exit codes that no other rank can cause."""
REBALANCE_EVERY_S = 0.5
"""Between two steps before which experts may move, those of one layer of each stage."""
_END_S = 1.0
"""SIGTERM ends a running rank at once; one that is still there after this time is stopped and needs SIGKILL."""


class RankLinks:
    """Sockets to ranks 1 ... `world_size` - 1. Use: `spawn`, then `collect` and `broadcast` in turn, then `run`."""

    def __init__(self, world_size: int, host: str, port: int, secret: bytes | None = None) -> None:
        """secret: from `node_secret`; messages are then sealed. Raises: ConfigError if it cannot listen there."""
        self.world_size = world_size
        self._codec = RankCodec()
        self._context = zmq.Context()
        try:
            self._reports = RankInbox(self._context, host, port, MAX_REPORT_BYTES, secret, leads=True)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen for ranks on {host}:{port}: {error}") from error
        self.busy: dict[int, RankBusy] = {rank: RankBusy() for rank in range(1, world_size)}
        """From each other rank's latest heartbeat."""
        self.address = self._reports.address
        self._orders: dict[int, RankOutbox] = {}
        self._heartbeats: dict[int, RankOutbox] = {}
        self._children: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._reading = threading.RLock()

    # ------------------------------------------------------------ start-up

    def spawn(
        self, role: Role, ranks: range, fields: dict[str, Any], leader: str, forked: Sequence[ForkedRank] = ()
    ) -> None:
        """Start local ranks: first in the processes of `forked`, further ones as programs. They die with the calling thread.
        `fields`: their configuration, which they get through a pipe."""
        for rank, child in zip(ranks, forked, strict=False):
            child.begin(fields, rank, leader)
            self._children[rank] = child
        payload = json.dumps(fields).encode()
        for rank in ranks[len(forked) :]:
            argv = module_command("common.node.ranks.main", role, "--rank", str(rank), "--leader", leader)
            child = subprocess.Popen(tied_command(argv), stdin=subprocess.PIPE)
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin as stdin:  # it has died: `check_children` says so
                stdin.write(payload)
            self._children[rank] = child

    def collect(
        self, kind: type[ReportT], timeout_s: float, what: str, *, since_s: float | None = None
    ) -> dict[int, ReportT]:
        """One report of `kind` from every other rank, within `timeout_s` of `since_s` (None: now). After that deadline only
        reports that are there already are read.

        Raises: ConfigError naming the ranks that did not report in time; a rank's own error if one failed; RankLost if
        one ended, or at `close`.
        """
        got: dict[int, ReportT] = {}
        told_s = time.monotonic()
        deadline_s = told_s + timeout_s if since_s is None else max(since_s + timeout_s, told_s + _LAST_LOOK_S)
        while len(got) < self.world_size - 1:
            missing = [rank for rank in range(1, self.world_size) if rank not in got]
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise ConfigError(f"no report from ranks {missing} within {timeout_s:.0f} s: {what}")
            if now_s > told_s + _PROGRESS_EVERY_S:
                told_s = now_s
                log.info("waiting for ranks %s: %s", missing, what)
            with self._reading:
                if self._closing:
                    raise RankLost("the node ends")
                for report in self._receive(timeout_ms=200):
                    _raise_if_failed(report)
                    if isinstance(report, RankHello):
                        for outboxes in (self._orders, self._heartbeats):
                            outboxes[report.rank] = RankOutbox(self._context, report.address)
                    if isinstance(report, kind):
                        got[report.rank] = report
            with self.prefer_rank_error():
                self.check_children()
        return got

    def pids(self) -> dict[int, int]:
        """Process ids of the ranks on this host but the leader."""
        return {rank: child.pid for rank, child in self._children.items()}

    def check_children(self) -> None:
        """Check that the local ranks run.

        Raises: RankLost naming one whose process ended. Of several, one that was killed: it caused the end of the others.
        """
        codes = self._exit_codes()
        if codes:
            rank = min(codes, key=codes.__getitem__)
            raise RankLost(f"rank {rank} (pid {self._children[rank].pid}) ended with {codes[rank]}")

    @contextlib.contextmanager
    def prefer_rank_error(self) -> Generator[None]:
        """Replace a RankLost raised inside by a rank's own error, if one was reported or still arrives. Use it only on
        the thread that reads reports. A killed rank reports nothing and is not waited for; after a crash, the errors of
        other ranks are only consequences and are ignored.

        Raises: a rank's own error in place of RankLost.
        """
        try:
            yield
        except RankLost:
            codes = self._exit_codes()
            if -signal.SIGKILL in codes.values():
                raise
            crashed = {rank for rank, code in codes.items() if code in _CRASHES}
            until_s = time.monotonic() + (_LAST_REPORT_S if codes else 0.0)
            with self._reading:
                while not self._closing:
                    for report in self._receive(timeout_ms=20):
                        if not crashed or (isinstance(report, RankFailed) and report.rank in crashed):
                            _raise_if_failed(report)
                    if time.monotonic() >= until_s:
                        break
            raise

    def _exit_codes(self) -> dict[int, int]:
        """Exit codes of the local ranks whose processes have ended."""
        return {rank: code for rank, child in self._children.items() if (code := child.poll()) is not None}

    def _receive(self, timeout_ms: int) -> Iterator[RankReport]:
        timeout_s = timeout_ms / 1000
        while (data := self._reports.receive(timeout_s)) is not None:
            timeout_s = 0.0
            try:
                yield self._codec.decode(data)
            except ProtocolError as error:
                log.warning("discarding a malformed report of a rank: %s", error)

    # ------------------------------------------------------------ running

    def broadcast(self, order: RankOrder) -> None:
        """Send an order to every other rank, from any thread. One thread's orders arrive in order."""
        data = self._codec.encode(order)
        with self._lock:
            for outbox in self._orders.values():
                outbox.send(data)

    def run(
        self, on_report: Callable[[RankReport], None], on_dead: Callable[[BaseException], None], lease_s: float
    ) -> None:
        """From now on pass every report to `on_report`, on a thread of its own, until `close`."""
        self._thread = threading.Thread(
            target=self._listen, args=(on_report, on_dead, lease_s), name="rank-reports", daemon=True
        )
        self._thread.start()

    def _listen(
        self, on_report: Callable[[RankReport], None], on_dead: Callable[[BaseException], None], lease_s: float
    ) -> None:
        last_heard_s = dict.fromkeys(range(1, self.world_size), time.monotonic())
        heartbeat_s = 0.0
        try:
            while not self._closing:
                for report in self._receive(timeout_ms=int(lease_s * 100)):
                    if isinstance(report, RankBeat):
                        last_heard_s[report.rank] = time.monotonic()
                        self.busy[report.rank] = report.busy
                    else:
                        _raise_if_failed(report)
                        on_report(report)
                now_s = time.monotonic()
                if now_s > heartbeat_s + lease_s / 6:
                    heartbeat_s = now_s
                    for rank, outbox in self._heartbeats.items():
                        outbox.send(self._codec.encode(LeaderBeat(rank)))
                with self.prefer_rank_error():
                    self.check_children()
                for rank, last_s in last_heard_s.items():
                    if now_s > last_s + lease_s:
                        raise RankLost(f"rank {rank} was silent for {lease_s:g} s")
        except Exception as error:  # after any error the node cannot go on without its ranks
            if not self._closing:
                on_dead(error)

    def close(self) -> None:
        """End the local ranks, and close the sockets once no other thread uses them."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()
        for child in self._children.values():
            if child.poll() is None:  # its process id is still its own
                end_children(child.pid)
            child.terminate()
        for child in self._children.values():
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        with self._reading:  # a start that was stopped may have left its reading thread behind
            self._reports.close()
            self._context.destroy(linger=0)


def _raise_if_failed(report: RankReport) -> None:
    """Raise the error that a rank reported before its end."""
    if isinstance(report, RankFailed):
        raise from_code(report.code, f"rank {report.rank}: {report.message}")


class MultiRankExecutor:
    """Runs a step on all ranks of a node: sends it to the others and computes the leader's own part here.

    With one pipeline stage the leader samples and returns the output; with more stages the last one reports it.
    """

    def __init__(self, links: RankLinks, local: LocalExecutor, *, samples_here: bool, rebalances: bool = False) -> None:
        """rebalances: experts may move among the ranks, every `REBALANCE_EVERY_S`."""
        self._links = links
        self._local = local
        self._samples_here = samples_here
        self._rebalances_at_s = monotonic() if rebalances else math.inf

    def submit(self, step: StepInput) -> StepOutput | None:
        """Run a step on all ranks. Raises: RankLost, after which the node must end."""
        output = self.start(step).wait()
        return output if self._samples_here else None

    def start(self, step: StepInput) -> RunningStep:
        """Send the step to all ranks and launch the leader's part. Raises: RankLost, as the result's `wait` does."""
        now_s = monotonic()
        if now_s >= self._rebalances_at_s:
            self._rebalances_at_s = now_s + REBALANCE_EVERY_S
            step = dataclasses.replace(step, rebalances=True)
        self._links.broadcast(step)
        own = _fail_as_rank_lost(lambda: self._local.start(step))
        return RunningStep(lambda: _fail_as_rank_lost(own.wait))


def _fail_as_rank_lost(part: Callable[[], ResultT]) -> ResultT:
    """Run the leader's part of a step. The other ranks compute theirs, or wait inside it for this one: if it fails, none of
    them can go on."""
    try:
        return part()
    except RankLost:
        raise
    except Exception as error:  # whatever it is
        raise RankLost(f"the leader's part of a step failed: {error}") from error
